"""HTTP/1.1 answers of engines, taken apart as their bytes arrive. Pure: bytes in, bytes out.

Only what a router needs: the head, and where the body ends (RFC 9112, section 6). Whatever is not
plainly right raises `BadFraming`; nothing is repaired.
"""

import re
from functools import lru_cache
from typing import Protocol

from msgspec import Struct, structs
from multidict import CIMultiDict, CIMultiDictProxy

from prefixfleet.router.headers import Passing

MAX_HEAD_BYTES = 64 * 1024
_MAX_LINE_BYTES = 4 * 1024
_STATUS = re.compile("[1-5][0-9]{2}", re.ASCII)
_NAME = re.compile(r'[^\x00-\x20\x7f()<>@,;:\\"/\[\]?={}]+')  # RFC 9110's tokens, and other letters
_CONTROL = re.compile(r"[\x00-\x08\x0a-\x1f\x7f]")
_LENGTH = b"\r\ncontent-length:"
_DIGITS = re.compile(b"[0-9]{1,18}")
KNOWN_HEADS = 256  # but for the length of the body, an engine's heads are alike for a second
_HEX = re.compile(b"[0-9a-fA-F]{1,15}")


class BadFraming(Exception):
    """The bytes are no HTTP/1.1 answer."""


class Head(Struct, frozen=True):
    """Status line and headers, without that of the body's ``length`` where it is one number.

    ``passing`` is what of them goes on to a client.
    """

    status: int
    headers: CIMultiDictProxy[str]
    keep_alive: bool
    passing: Passing
    length: int | None = None


class Framing(Protocol):
    """Finds the end of one body. `done` turns true with its last byte, never before."""

    done: bool

    def feed(self, data: bytes) -> bytes:
        """The body's part of ``data``. Raises `BadFraming`, also for bytes after the end."""
        ...

    def at_close(self) -> bool:
        """Whether the body may end here, with the connection."""
        ...


def parse_head(raw: bytes) -> Head:
    """The head in ``raw``, which ends before its empty line."""
    at = raw.lower().find(_LENGTH)
    if at < 0:
        return _known_head(raw)
    stop = raw.find(b"\r\n", at + 2)
    stop = len(raw) if stop < 0 else stop
    length = raw[at + len(_LENGTH) : stop].strip(b" \t")
    if not _DIGITS.fullmatch(length):
        return _known_head(raw)  # which is no head at all, or `framing_of` says so
    return structs.replace(_known_head(raw[:at] + raw[stop:]), length=int(length))


@lru_cache(KNOWN_HEADS)
def _known_head(raw: bytes) -> Head:
    lines = raw.decode("utf-8", "replace").split("\r\n")
    version, _, rest = lines[0].partition(" ")
    code, _, _ = rest.partition(" ")
    if version not in ("HTTP/1.1", "HTTP/1.0") or not _STATUS.fullmatch(code):
        raise BadFraming(f"status line {lines[0]!r:.80}")
    headers: CIMultiDict[str] = CIMultiDict()
    for line in lines[1:]:
        name, colon, value = line.partition(":")
        if not colon or not _NAME.fullmatch(name) or _CONTROL.search(value):
            raise BadFraming(f"header {line!r:.80}")
        headers.add(name, value.strip(" \t"))
    options = ",".join(headers.getall("Connection", ())).lower()
    keep_alive = "close" not in options and (version == "HTTP/1.1" or "keep-alive" in options)
    return Head(int(code), CIMultiDictProxy(headers), keep_alive, Passing(headers))


def framing_of(head: Head) -> Framing:
    """How the body of this answer (to a POST) ends."""
    if head.status in (204, 304):
        return Length(0)
    codings = head.headers.getall("Transfer-Encoding", [])
    lengths = head.headers.getall("Content-Length", [])  # what is odd, or said again
    if codings:
        coding = ", ".join(codings)  # several headers are one list
        if coding.lower() != "chunked" or head.length is not None or lengths:
            raise BadFraming(f"Transfer-Encoding {coding!r:.40}")
        return Chunked()
    if any(length != str(head.length) for length in lengths):
        raise BadFraming(f"Content-Length {[head.length, *lengths]!r:.40}")
    return UntilClose() if head.length is None else Length(head.length)


class Length:
    """A body of a known number of bytes."""

    def __init__(self, num_bytes: int) -> None:
        self._left = num_bytes
        self.done = num_bytes == 0

    def feed(self, data: bytes) -> bytes:
        """See `Framing`."""
        if len(data) > self._left:
            raise BadFraming("bytes after the end of the answer")
        self._left -= len(data)
        self.done = self._left == 0
        return data

    def at_close(self) -> bool:
        """See `Framing`."""
        return self.done


class UntilClose:
    """A body that ends with its connection."""

    done = False

    def feed(self, data: bytes) -> bytes:
        """See `Framing`."""
        return data

    def at_close(self) -> bool:
        """See `Framing`."""
        return True


class Chunked:
    """A body in chunks, each with its length before it."""

    def __init__(self) -> None:
        self.done = False
        self._pending = b""  # an incomplete line
        self._left = 0  # bytes of the present chunk, its CRLF included
        self._in_trailer = False

    def feed(self, data: bytes) -> bytes:
        """See `Framing`."""
        if self._pending:
            data, self._pending = self._pending + data, b""
        parts: list[bytes] = []
        at = 0
        while at < len(data) and not self.done:
            if self._left:
                at = self._chunk(data, at, parts)
            else:
                at = self._whole_chunks(data, at, parts)
                at = self._line(data, at) if at < len(data) and not self._left else at
        if at < len(data):
            raise BadFraming("bytes after the end of the answer")
        return parts[0] if len(parts) == 1 else b"".join(parts)

    def _whole_chunks(self, data: bytes, at: int, parts: list[bytes]) -> int:
        """Take the chunks that are there whole, which is nearly all of them; the new position."""
        while not self._in_trailer:
            end = data.find(b"\r\n", at)
            if end < 0:
                return at
            start = end + 2
            stop = start + _size(data[at:end])
            if stop == start or data[stop : stop + 2] != b"\r\n":
                return at
            parts.append(data[start:stop])
            at = stop + 2
        return at

    def at_close(self) -> bool:
        """See `Framing`."""
        return self.done

    def _chunk(self, data: bytes, at: int, parts: list[bytes]) -> int:
        """Take what is there of the present chunk; the new position."""
        end = min(len(data), at + self._left)
        if self._left > 2:
            parts.append(data[at : min(end, at + self._left - 2)])
        ending = data[max(at, at + self._left - 2) : end]
        if ending != b"\r\n"[2 - min(2, self._left) :][: len(ending)]:
            raise BadFraming("a chunk that is longer than it says")
        self._left -= end - at
        return end

    def _line(self, data: bytes, at: int) -> int:
        """Take a line of length or of the trailer; the new position."""
        end = data.find(b"\r\n", at)
        if end < 0:
            self._pending = data[at:]
            if len(self._pending) > _MAX_LINE_BYTES:
                raise BadFraming("a line without an end")
            return len(data)
        if self._in_trailer:
            self.done = end == at
        else:
            size = _size(data[at:end])
            self._left, self._in_trailer = (size + 2 if size else 0), size == 0
        return end + 2


def _size(line: bytes) -> int:
    digits = line.partition(b";")[0].strip(b" \t")
    if not _HEX.fullmatch(digits):
        raise BadFraming(f"length of a chunk {line!r:.40}")
    return int(digits, 16)
