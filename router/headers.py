"""Header hygiene: which headers pass through the router, in which direction. Pure."""

from collections.abc import Iterable, Mapping
from typing import NamedTuple

from multidict import CIMultiDict, MultiMapping

from prefixfleet.router.errors import BadRequest
from prefixfleet.store.retention import MAX_PRIORITY, MAX_TTL_S

MAX_DEADLINE_MS = 86_400_000
MAX_DIGITS = 10
MAX_REQUEST_ID = 128  # characters
OURS = "x-prefixfleet-"
DEADLINE = OURS + "ttft-deadline-ms"
"""A client's own limit on the time to first token: what would come later is refused at once (429),
what has not come by then is given up (504)."""

KEEP = OURS + "keep-s"
"""A client's wish that its prompt's prefix stays for so many seconds on the node that got it."""

PRIORITY = OURS + "keep-priority"
"""Of that wish: where a node's quota is full, it takes the place of those of a lower one."""

REQUEST_ID = "x-request-id"
"""What a client calls its request; ours where it says nothing, or nothing that may be repeated."""

_HOP_BY_HOP = {
    "connection",
    "keep-alive",
    "proxy-authenticate",
    "proxy-authorization",
    "proxy-connection",
    "te",
    "trailer",
    "transfer-encoding",
    "upgrade",
}
# The router decodes bodies and sets their length itself; it reads answers, so they stay plain
_OF_THE_REQUEST = {"host", "content-length", "content-encoding", "accept-encoding", "expect"}
_KEY_HEADERS = {"authorization", "x-api-key"}
_OF_THE_ANSWER = {"date", "server", "content-length", REQUEST_ID}


def worker_lines(headers: MultiMapping[str], *, with_key: bool) -> str:
    """Lines of the upstream request: the client's headers, without what is ours or of one hop.

    The API key passes on ``with_key``: where it is the router's own, no engine needs to see it.
    """
    dropped = _OF_THE_REQUEST if with_key else _OF_THE_REQUEST | _KEY_HEADERS
    return lines_of([*_kept(headers, dropped), ("Accept-Encoding", "identity")])


def lines_of(fields: Iterable[tuple[str, str]]) -> str:
    """Lines of a head, each with its end. Raises `ValueError` for a value that would end its own
    line: what follows would be a header."""
    lines = [f"{name}: {value}\r\n" for name, value in fields]
    text = "".join(lines)
    if text.count("\n") != len(lines) or text.count("\r") != len(lines):
        raise ValueError("a header holds the end of a line")
    return text


def request_id_of(headers: Mapping[str, str]) -> str:
    """What the client calls its request; empty if nothing, or nothing that may be repeated."""
    text = headers.get(REQUEST_ID)
    if text is None:
        return ""
    return text if len(text) <= MAX_REQUEST_ID and text.isascii() and text.isprintable() else ""


def deadline_of(headers: Mapping[str, str]) -> float:
    """The client's deadline in seconds; 0 if it names none. Raises `BadRequest`."""
    text = headers.get(DEADLINE)
    if text is None:
        return 0.0
    if not 0 < (number := _number(text)) <= MAX_DEADLINE_MS:
        raise BadRequest(f"{DEADLINE}: got {text!r:.40}, expected 1 to {MAX_DEADLINE_MS}")
    return number / 1_000


class KeepWish(NamedTuple):
    """How long a prefix shall stay, and how much that matters."""

    ttl_s: float  # 0: as long as it does
    priority: int


NO_WISH = KeepWish(0.0, 0)


def keep_of(headers: Mapping[str, str]) -> KeepWish:
    """The client's wish. Raises `BadRequest`."""
    text, priority = headers.get(KEEP), headers.get(PRIORITY)
    if text is None:
        if priority is not None:
            raise BadRequest(f"{PRIORITY} is of a wish: set {KEEP} too, to its seconds")
        return NO_WISH
    if not 0 < (number := _number(text)) <= MAX_TTL_S:
        raise BadRequest(f"{KEEP}: got {text!r:.40}, expected 1 to {MAX_TTL_S:.0f}")
    if priority is None:
        return KeepWish(number, 0)
    level = _number(priority)
    if (not level and priority != "0") or level > MAX_PRIORITY:
        raise BadRequest(f"{PRIORITY}: got {priority!r:.40}, expected 0 to {MAX_PRIORITY}")
    return KeepWish(number, level)


def retry_after_of(headers: Mapping[str, str]) -> int:
    """Seconds until who answered so may be asked again; 0 if it does not say, or says a date."""
    return _number(headers.get("Retry-After", ""))


def _number(text: str) -> int:
    """0 if ``text`` is no whole number of at most `MAX_DIGITS`."""
    return int(text) if len(text) <= MAX_DIGITS and text.isascii() and text.isdigit() else 0


class AnswerHeaders:
    """Headers of an answer to a client: those of its worker that pass, and ours.

    ``passing`` has their lines too, made once for all answers with the same head; ``length`` is of
    the body, where it is known before it has come.
    """

    __slots__ = ("_ours", "_passing", "length")

    def __init__(
        self, ours: Mapping[str, str], passing: "Passing | None" = None, length: int | None = None
    ) -> None:
        self._ours = ours
        self._passing = passing or NOTHING
        self.length = length

    def lines(self) -> str:
        """See `lines_of`."""
        return self._passing.lines + lines_of(self._ours.items())

    def fields(self) -> CIMultiDict[str]:
        """The same for aiohttp, with the length."""
        made = CIMultiDict(self._passing.fields)
        made.update(self._ours)
        if self.length is not None:
            made["Content-Length"] = str(self.length)
        return made


class Passing:
    """A worker's headers without those of one hop, the length, and what the router says itself."""

    __slots__ = ("fields", "lines")

    def __init__(self, headers: MultiMapping[str]) -> None:
        self.fields = list(_kept(headers, _OF_THE_ANSWER))
        self.lines = lines_of(self.fields)


def _kept(headers: MultiMapping[str], dropped: set[str]) -> Iterable[tuple[str, str]]:
    options = ",".join(headers.getall("Connection", ()))
    out = _HOP_BY_HOP | dropped | {option.strip().lower() for option in options.split(",")}
    for name, value in headers.items():
        lower = name.lower()
        if lower not in out and not lower.startswith(OURS):
            yield name, value


NOTHING = Passing(CIMultiDict())
