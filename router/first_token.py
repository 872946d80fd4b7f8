"""When the first token of a response's stream has come. Pure but for `FirstToken`.

Such a stream begins with events that engines write as soon as they have the request, before any of
it was computed: their seconds are no prefill's.
"""

import re
from collections.abc import Callable

BEFORE = {b"response.created", b"response.queued", b"response.in_progress"}
_LINE = re.compile(rb"(?:^|\n)(?:event:[ \t]*+([^\r\n]*+)[\r\n]|data:)")
MAX_NAME = 256  # bytes of a line that has not ended yet


class FirstToken:
    """Hears one stream until an event comes that is none of `BEFORE`, and calls ``came`` once.

    Where events have no names the first one counts.
    """

    def __init__(self, came: Callable[[], None]) -> None:
        self._came = came
        self._line = b"\n"  # the one that has not ended, with the end of the one before
        self._named = False
        self.done = False

    def hear(self, part: bytes) -> None:
        """The next bytes of the stream."""
        if self.done:
            return
        heard = self._line + part
        if any(map(self._is_token, _LINE.finditer(heard))):
            self.done = True
            self._came()
        self._line = heard[max(0, heard.rfind(b"\n")) :][:MAX_NAME]

    def _is_token(self, line: re.Match[bytes]) -> bool:
        if line[1] is None:
            return not self._named
        self._named = True
        return line[1].strip() not in BEFORE
