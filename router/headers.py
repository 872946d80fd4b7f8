"""Header hygiene: which headers pass through the router, in which direction. Pure."""

from collections.abc import Iterable, Mapping

from multidict import CIMultiDict

from prefixfleet.router.errors import BadRequest
from prefixfleet.store.retention import MAX_TTL_S

MAX_DEADLINE_MS = 86_400_000
OURS = "x-prefixfleet-"
DEADLINE = OURS + "ttft-deadline-ms"
"""A client's own limit on the time to first token: refuse at once what would come later."""

KEEP = OURS + "keep-s"
"""A client's wish that its prompt's prefix stays for so many seconds on the node that got it."""

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
_OF_THE_ANSWER = {"date", "server"}


def to_worker(
    headers: Mapping[str, str], request: str, *, with_key: bool = True
) -> CIMultiDict[str]:
    """Headers of the upstream request: the client's, without what is ours or of one hop.

    The API key passes on ``with_key``: where it is the router's own, no engine needs to see it.
    A client's own ``X-Request-Id`` stays, else it is ``request``.
    """
    dropped = _OF_THE_REQUEST if with_key else _OF_THE_REQUEST | _KEY_HEADERS
    kept = CIMultiDict(_kept(headers, dropped))
    kept["Accept-Encoding"] = "identity"
    kept.setdefault("X-Request-Id", request)
    return kept


def deadline_of(headers: Mapping[str, str]) -> float:
    """The client's deadline in seconds; 0 if it names none. Raises `BadRequest`."""
    text = headers.get(DEADLINE)
    if text is None:
        return 0.0
    if not (text.isascii() and text.isdigit() and 0 < int(text) <= MAX_DEADLINE_MS):
        raise BadRequest(f"{DEADLINE}: got {text!r:.40}, expected 1 to {MAX_DEADLINE_MS}")
    return int(text) / 1_000


def keep_of(headers: Mapping[str, str]) -> float:
    """Seconds of the client's wish; 0 if it has none. Raises `BadRequest`."""
    text = headers.get(KEEP)
    if text is None:
        return 0.0
    if not (text.isascii() and text.isdigit() and 0 < int(text[:10]) <= MAX_TTL_S):
        raise BadRequest(f"{KEEP}: got {text!r:.40}, expected 1 to {MAX_TTL_S:.0f}")
    return float(text)


def to_client(headers: Mapping[str, str], ours: Mapping[str, str]) -> CIMultiDict[str]:
    """Headers of the answer: the worker's, without those of one hop, and ours."""
    kept = CIMultiDict(_kept(headers, _OF_THE_ANSWER))
    kept.update(ours)
    return kept


def _kept(headers: Mapping[str, str], dropped: set[str]) -> Iterable[tuple[str, str]]:
    named = {name.strip().lower() for name in headers.get("Connection", "").split(",")}
    out = _HOP_BY_HOP | dropped | named
    for name, value in headers.items():
        lower = name.lower()
        if lower not in out and not lower.startswith(OURS):
            yield name, value
