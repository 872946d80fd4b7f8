"""Header hygiene: which headers pass through the router, in which direction. Pure."""

from collections.abc import Iterable, Mapping

from multidict import CIMultiDict

OURS = "x-prefixfleet-"

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
_OF_THE_ANSWER = {"date", "server"}


def to_worker(headers: Mapping[str, str], request: str) -> CIMultiDict[str]:
    """Headers of the upstream request: the client's, without what is ours or of one hop.

    ``Authorization`` passes on. A client's own ``X-Request-Id`` stays, else it is ``request``.
    """
    kept = CIMultiDict(_kept(headers, _OF_THE_REQUEST))
    kept["Accept-Encoding"] = "identity"
    kept.setdefault("X-Request-Id", request)
    return kept


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
