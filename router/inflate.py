"""Compressed request bodies, unpacked under a limit: a few bytes may not become gigabytes. Pure."""

import zlib

from prefixfleet.router.errors import BadRequest, TooLarge, UnknownEncoding

_GZIP = 16 + zlib.MAX_WBITS
_WINDOW = {"gzip": _GZIP, "x-gzip": _GZIP, "deflate": zlib.MAX_WBITS}  # RFC 9110, 8.4.1


def inflate(raw: bytes, encoding: str, max_bytes: int) -> bytes:
    """``raw`` as the client meant it.

    Raises:
        UnknownEncoding: neither gzip nor deflate.
        BadRequest: it is not what ``encoding`` says, or was cut off.
        TooLarge: it unpacks to more than ``max_bytes``.
    """
    name = encoding.strip().lower()
    if name in ("", "identity"):
        return raw
    if name not in _WINDOW:
        raise UnknownEncoding(f"Content-Encoding {encoding!r:.80}; use gzip, deflate or none")
    unpacker = zlib.decompressobj(_WINDOW[name])
    try:
        unpacked = unpacker.decompress(raw, max_bytes + 1)
    except zlib.error as error:
        raise BadRequest(f"the body is no {name}: {error}") from None
    if len(unpacked) > max_bytes:
        raise body_too_large(max_bytes)
    if not unpacker.eof or unpacker.unused_data:
        raise BadRequest(f"the body is no whole {name} stream")
    return unpacked


def body_too_large(max_bytes: int) -> TooLarge:
    """The refusal of a body over the limit."""
    return TooLarge(
        f"the body is larger than {max_bytes} bytes (PREFIXFLEET_ROUTER_MAX_BODY_BYTES)"
    )
