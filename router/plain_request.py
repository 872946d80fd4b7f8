"""Requests as nearly every client sends them, read without a whole HTTP parser. Pure.

What is unusual in any way is `NotPlain` and is left to the full parser, which also has the last
word on what is wrong: nothing is refused here. So this may be short, and is stricter than HTTP is.
"""

import re
from dataclasses import dataclass

from multidict import CIMultiDict

MAX_HEAD_BYTES = 4_096
MAX_BODY_BYTES = 1 << 20  # a longer one comes in parts, and its parsing is not what takes time
_TOKEN = rb"[!#$%&'*+.^_`|~0-9A-Za-z-]+"
_VALUE = rb"[\t -~\x80-\xff]*"
_HEAD = re.compile(rb"POST (/[a-z0-9_/]+) HTTP/1\.1((?:\r\n" + _TOKEN + rb":" + _VALUE + rb")+)")
_DIGITS = re.compile("[0-9]{1,9}", re.ASCII)
_UNUSUAL = {"transfer-encoding", "content-encoding", "expect", "upgrade", "te", "trailer"}


class NotPlain(Exception):
    """For the full parser to judge."""


@dataclass(frozen=True, slots=True)
class PlainHead:
    """The body is the ``body_bytes`` from ``start`` on in the bytes that were read."""

    path: str
    headers: CIMultiDict[str]
    start: int
    body_bytes: int


def plain_head(data: bytes) -> PlainHead | None:
    """The head at the start of ``data``; None if more must come first. Raises `NotPlain`."""
    end = data.find(b"\r\n\r\n", 0, MAX_HEAD_BYTES)
    if end < 0:
        if len(data) >= MAX_HEAD_BYTES or not data.startswith(b"POST /"[: len(data)]):
            raise NotPlain
        return None
    found = _HEAD.fullmatch(data, 0, end)
    if found is None:
        raise NotPlain
    headers = _headers(found[2].decode("utf-8", "surrogateescape"))
    length = headers.get("Content-Length", "")
    if not _DIGITS.fullmatch(length) or int(length) > MAX_BODY_BYTES or "Host" not in headers:
        raise NotPlain
    return PlainHead(found[1].decode(), headers, end + 4, int(length))


def _headers(text: str) -> CIMultiDict[str]:
    fields = [line.partition(":") for line in text.split("\r\n")[1:]]
    names = {name.lower() for name, _, _ in fields}
    if len(names) != len(fields) or not names.isdisjoint(_UNUSUAL):
        raise NotPlain
    headers = CIMultiDict((name, value.strip(" \t")) for name, _, value in fields)
    if "connection" in names and headers["Connection"].lower() != "keep-alive":
        raise NotPlain
    return headers
