"""TCP ports that stay ours between choosing them and a child process listening on them."""

import socket

from prefixfleet.store.errors import ConfigError


def hold_port(host: str, port: int = 0) -> socket.socket:
    """A socket bound to (host, port), not listening; 0 takes a free port.

    While it is open nobody is given that port by chance, and a server that sets SO_REUSEADDR (all
    of ours do) may listen on it: Linux allows that next to a socket that does not listen itself.

    Raises:
        ConfigError: somebody listens there, or the address is not ours.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    held = socket.socket(family, socket.SOCK_STREAM)
    held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        held.bind((host, port))
    except OSError as error:
        held.close()
        raise ConfigError(f"{host}:{port} cannot be used: {error.strerror or error}") from error
    return held
