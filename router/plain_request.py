"""Requests as nearly every client sends them, read without a whole HTTP parser. Pure.

What is unusual in any way is `NotPlain` and is left to the full parser, which also has the last
word on what is wrong: nothing is refused here. So this may be short, and is stricter than HTTP is.
"""

import re
from dataclasses import dataclass, field
from functools import lru_cache

from msgspec import Struct
from multidict import CIMultiDict, CIMultiDictProxy

from prefixfleet.router.headers import worker_lines

MAX_HEAD_BYTES = 4_096
MAX_BODY_BYTES = 1 << 20  # a longer one comes in parts, and its parsing is not what takes time
_TOKEN = rb"[!#$%&'*+.^_`|~0-9A-Za-z-]+"
_VALUE = rb"[\t -~\x80-\xff]*"
_HEAD = re.compile(rb"POST (/[a-z0-9_/]+) HTTP/1\.1((?:\r\n" + _TOKEN + rb":" + _VALUE + rb")+)")
_DIGITS = re.compile(b"[0-9]{1,9}")
_LENGTH = b"\r\ncontent-length:"
KNOWN_HEADS = 1_024  # but for the length of its body, a client sends the same one again and again
_UNUSUAL = {"transfer-encoding", "content-encoding", "expect", "upgrade", "te", "trailer"}


class NotPlain(Exception):
    """For the full parser to judge."""


@dataclass(frozen=True, slots=True)
class Fields:
    """A head without the length of the body."""

    path: str
    headers: CIMultiDictProxy[str]
    _lines: dict[bool, str] = field(default_factory=dict, compare=False)

    def worker_lines(self, with_key: bool) -> str:
        """See `headers.worker_lines`; made once."""
        lines = self._lines.get(with_key)
        if lines is None:
            lines = self._lines[with_key] = worker_lines(self.headers, with_key=with_key)
        return lines


class PlainHead(Struct, frozen=True):
    """The body is the ``body_bytes`` from ``start`` on in the bytes that were read."""

    fields: Fields
    start: int
    body_bytes: int


def plain_head(data: bytes) -> PlainHead | None:
    """The head at the start of ``data``; None if more must come first. Raises `NotPlain`."""
    end = data.find(b"\r\n\r\n", 0, MAX_HEAD_BYTES)
    if end < 0:
        if len(data) >= MAX_HEAD_BYTES or not data.startswith(b"POST /"[: len(data)]):
            raise NotPlain
        return None
    at = data[:end].lower().find(_LENGTH)
    stop = data.find(b"\r\n", at + 2, end + 2)
    length = data[at + len(_LENGTH) : stop].strip(b" \t")
    if at < 0 or not _DIGITS.fullmatch(length) or int(length) > MAX_BODY_BYTES:
        raise NotPlain
    return PlainHead(_fields(data[:at] + data[stop:end]), end + 4, int(length))


@lru_cache(KNOWN_HEADS)
def _fields(head: bytes) -> Fields:
    found = _HEAD.fullmatch(head)
    if found is None:
        raise NotPlain
    headers = _headers(found[2].decode("utf-8", "surrogateescape"))
    if "Host" not in headers or "Content-Length" in headers:
        raise NotPlain
    return Fields(found[1].decode(), CIMultiDictProxy(headers))


def _headers(text: str) -> CIMultiDict[str]:
    fields = [line.partition(":") for line in text.split("\r\n")[1:]]
    names = {name.lower() for name, _, _ in fields}
    if len(names) != len(fields) or not names.isdisjoint(_UNUSUAL):
        raise NotPlain
    headers = CIMultiDict((name, value.strip(" \t")) for name, _, value in fields)
    if "connection" in names and headers["Connection"].lower() != "keep-alive":
        raise NotPlain
    return headers
