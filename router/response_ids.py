"""The id of a response, read from the beginning of its bytes while they pass. Pure but for `Ear`.

Only the id's own place counts: the first object's ``id`` in a plain answer, that of ``response`` in
a stream's first event, with nothing but plain members before it. What an answer says further on may
be a model's words, and can name anything.
"""

import re
from collections.abc import Callable

import msgspec

MAX_HEARD_BYTES = 4_096
MAX_ID = 256  # characters; engines' own have 37

_STRING = rb'"(?:[^"\\]|\\.)*+"'
_MEMBER = _STRING + rb"\s*+:\s*+(?:" + _STRING + rb'|[^\s"{}\[\],:]++)\s*+,\s*+'
_ID = rb'\{\s*+(?:(?!"id"\s*+:)' + _MEMBER + rb')*+"id"\s*+:\s*+(' + _STRING + rb")"
_WHOLE = re.compile(rb"\s*+" + _ID, re.DOTALL)
_EVENT = re.compile(
    rb"(?:(?!data:)[^\n]*+\n)*+data:\s*+\{\s*+(?:" + _MEMBER + rb')*+"response"\s*+:\s*+' + _ID,
    re.DOTALL,
)


def response_id(beginning: bytes, *, stream: bool) -> str:
    """The id in the first bytes of an answer; empty if it is not there, or is none."""
    found = (_EVENT if stream else _WHOLE).match(beginning)
    if found is None:
        return ""
    try:
        text = msgspec.json.decode(found[1], type=str)
    except (msgspec.MsgspecError, UnicodeDecodeError):
        return ""
    return text if len(text) <= MAX_ID else ""


class Ear:
    """Hears one answer until its id has come, or cannot come any more."""

    def __init__(self, stream: bool, found: Callable[[str], None]) -> None:
        self._stream = stream
        self._found = found
        self._heard = b""
        self.done = False

    def hear(self, part: bytes) -> None:
        """The next bytes of the answer."""
        if self.done or len(self._heard) >= MAX_HEARD_BYTES:
            return
        self._heard += part[:MAX_HEARD_BYTES]
        if text := response_id(self._heard, stream=self._stream):
            self.done, self._heard = True, b""
            self._found(text)
