"""What happens on a client's connection outside of any route: what cannot be read as a request is
refused in the same shape as everything else, and a client that reads nothing is cut off.
"""

import logging
from collections.abc import Callable, Mapping

from aiohttp import web

from prefixfleet.router.errors import BadRequest, Refusal, refuse
from prefixfleet.router.headers import REQUEST_ID, request_id_of
from prefixfleet.router.metrics import Metrics

log = logging.getLogger(__name__)

NO_ROUTE = "other"  # label of what never came to one


class Edge:
    """Owned by the router's event loop. Nobody has shown a key yet: nothing here may cost much or
    write many lines."""

    def __init__(self, metrics: Metrics, unread_s: float, new_id: Callable[[], str]) -> None:
        """``unread_s`` seconds may pass until a client has taken what was written to it."""
        self.unread_s = unread_s
        self._metrics = metrics
        self._new_id = new_id

    def refusal(self, status: int, message: str, headers: Mapping[str, str]) -> web.Response:
        """The answer to what is no request, or has only ``headers``; counted. It ends the
        connection."""
        log.debug("not a request: %.200r", message)
        self._metrics.labelled(self._metrics.requests, NO_ROUTE, f"{status}").inc()
        error = Refusal(message) if status >= 500 else BadRequest(message)
        answer = refuse(error)
        answer.set_status(status)
        answer.headers[REQUEST_ID] = request_id_of(headers) or self._new_id()
        answer.force_close()
        return answer

    def unread(self) -> None:
        """A client was cut off because it did not take its answer."""
        self._metrics.cut_clients.labels("unread").inc()
        log.info("a client took nothing of its answer for %.0f s: cut off", self.unread_s)
