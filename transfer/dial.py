"""Connections to peers as `Stream`s want them."""

import asyncio
import contextlib
import socket
import struct

from prefixfleet.store.errors import PeerLost
from prefixfleet.transfer import stream
from prefixfleet.transfer.crew import Crew


def tune(sock: socket.socket) -> None:
    """What every peer connection wants: no delays, no waiting for ever, not even in a thread."""
    sock.setblocking(True)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(stream.STALL_S * 1000))
    limit = struct.pack("@ll", int(stream.STALL_S), int(stream.STALL_S % 1 * 1e6))
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, limit)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, limit)


async def dial(host: str, port: int, where: str, crew: Crew | None) -> stream.Stream:
    """Connect to the first address of ``host`` that answers. Raises `PeerLost`."""
    loop = asyncio.get_running_loop()
    last: OSError = OSError("no address")
    try:
        found = await loop.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError) as error:  # the latter where it can be no host's name
        raise PeerLost(f"{where}: {error}") from error
    for family, kind, protocol, _, address in found:
        with contextlib.ExitStack() as undo:
            try:
                sock = undo.enter_context(socket.socket(family, kind, protocol))
                sock.setblocking(False)
                await loop.sock_connect(sock, address)
                tune(sock)
            except OSError as error:
                last = error
                continue
            undo.pop_all()
            return stream.Stream(sock, where, crew)
    raise PeerLost(f"{where}: {last}") from last
