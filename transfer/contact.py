"""Contacts: "tcp://host:port", with IPv6 addresses in brackets. No I/O."""

from urllib.parse import urlsplit

from prefixfleet.store.errors import ProtocolError


def format_contact(link: str, host: str, port: int) -> str:
    """The contact of a listener of ``link`` at ``host``, a name or an address, and ``port``."""
    return f"{link}://[{host}]:{port}" if ":" in host else f"{link}://{host}:{port}"


def parse_contact(link: str, contact: str) -> tuple[str, int]:
    """Host and port. Raises `ProtocolError` if it is not a contact of ``link``."""
    try:
        parts = urlsplit(contact)
        host, port = parts.hostname, parts.port
    except ValueError:
        host = port = None
    if not host or not port or parts.scheme != link or parts.path or parts.query or parts.username:
        raise ProtocolError(
            f"contact: got {contact!r:.200}, expected {link}://host:port "
            f"(or {link}://[IPv6 address]:port)"
        )
    return host, port
