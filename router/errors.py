"""What the router says no with: one table of cause to status, in the OpenAI error shape.

A client's mistake is never a 5xx, and every refusal says what to do about it.
"""

from typing import ClassVar

import msgspec
from aiohttp import web

from prefixfleet.store.errors import FleetError


class Refusal(FleetError):
    """An answer that is not the engine's. ``param`` names the field at fault, if one is."""

    status: ClassVar[int] = 500
    kind: ClassVar[str] = "server_error"
    code: ClassVar[str] = "internal_error"

    def __init__(
        self, message: str, *, param: str | None = None, retry_after_s: float | None = None
    ) -> None:
        super().__init__(message)
        self.param = param
        self.retry_after_s = retry_after_s


class BadRequest(Refusal):
    """The request cannot be understood."""

    status, kind, code = 400, "invalid_request_error", "invalid_request"


class Unauthorized(Refusal):
    """The API key is absent or unknown."""

    status, kind, code = 401, "invalid_request_error", "invalid_api_key"


class Forbidden(Refusal):
    """Whoever asks may not, with any key."""

    status, kind, code = 403, "invalid_request_error", "forbidden"


class UnknownModel(Refusal):
    """No worker has served this model since the router started, or it is a typing error."""

    status, kind, code = 404, "invalid_request_error", "model_not_found"


class NotFound(Refusal):
    """There is no such route."""

    status, kind, code = 404, "invalid_request_error", "not_found"


class ResponseNotFound(Refusal):
    """No worker keeps a response with this id, for this tenant."""

    status, kind, code = 404, "invalid_request_error", "response_not_found"


class PreviousNotFound(ResponseNotFound):
    """The same of the response that a request goes on from."""

    code = "previous_response_not_found"


class Conflict(Refusal):
    """It is there already."""

    status, kind, code = 409, "invalid_request_error", "conflict"


class TooSlow(Refusal):
    """The client does not send what it announced."""

    status, kind, code = 408, "invalid_request_error", "request_timeout"


class TooLarge(Refusal):
    """The body is over the limit."""

    status, kind, code = 413, "invalid_request_error", "request_too_large"


class UnknownEncoding(Refusal):
    """The body is compressed in a way that is not understood here."""

    status, kind, code = 415, "invalid_request_error", "unsupported_encoding"


class TooBusy(Refusal):
    """The fleet could serve this, but not now: come back after ``retry_after_s``."""

    status, kind, code = 429, "rate_limit_error", "overloaded"


class NotOffered(Refusal):
    """The engine cannot do this."""

    status, kind, code = 501, "server_error", "not_offered"


class UpstreamFailed(Refusal):
    """Every worker that was tried failed before its first byte."""

    status, kind, code = 502, "server_error", "upstream_failed"


class NoWorker(Refusal):
    """No worker is ready to serve the model."""

    status, kind, code = 503, "server_error", "no_worker"


class AllDrained(NoWorker):
    """An operator has drained every worker of the model: none comes back by itself."""


class ResponseUnavailable(Refusal):
    """The worker that keeps the response cannot be asked now."""

    status, kind, code = 503, "server_error", "response_unavailable"


class OrdersUnavailable(Refusal):
    """An operator's order cannot be kept where all routers see it."""

    status, kind, code = 503, "server_error", "orders_unavailable"


class TooLate(Refusal):
    """The client's own limit on the time to first token has passed."""

    status, kind, code = 504, "server_error", "deadline_exceeded"


def refuse(error: Refusal, *, anthropic: bool = False) -> web.Response:
    """The answer to a refused request, in OpenAI's error shape or in Anthropic's."""
    headers, body = refusal(error, anthropic=anthropic)
    return web.Response(status=error.status, body=body, headers=headers)


def refusal(error: Refusal, *, anthropic: bool = False) -> tuple[dict[str, str], bytes]:
    """Headers and body of `refuse`."""
    headers = {"Content-Type": JSON}
    if error.retry_after_s is not None:
        headers["Retry-After"] = str(max(1, round(error.retry_after_s)))
    return headers, anthropic_error_body(error) if anthropic else error_body(error)


def error_body(error: Refusal) -> bytes:
    """The OpenAI error object of ``error``, as JSON."""
    return msgspec.json.encode(
        {
            "error": {
                "message": str(error),
                "type": error.kind,
                "param": error.param,
                "code": error.code,
            }
        }
    )


def anthropic_error_body(error: Refusal) -> bytes:
    """The Anthropic error object of ``error``, as JSON."""
    kind = _ANTHROPIC_KINDS.get(error.status, "api_error")
    return msgspec.json.encode({"type": "error", "error": {"type": kind, "message": str(error)}})


def error_event(error: Refusal, *, anthropic: bool = False) -> bytes:
    """``error`` as a stream says it: OpenAI's clients look at the data, Anthropic's at the name."""
    if anthropic:
        return b"event: error\ndata: %b\n\n" % anthropic_error_body(error)
    return b"data: %b\n\n" % error_body(error)


JSON = "application/json"

_ANTHROPIC_KINDS = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    415: "invalid_request_error",
    429: "rate_limit_error",
    503: "overloaded_error",
}
