"""Routes, and the one place where an exception becomes an answer in the OpenAI error shape."""

import asyncio
import logging
from collections import Counter
from collections.abc import Awaitable, Callable

import msgspec
from aiohttp import web
from aiohttp.http_exceptions import HttpProcessingError

from prefixfleet.router.core import Router
from prefixfleet.router.errors import JSON, BadRequest, NotFound, Refusal, refuse
from prefixfleet.router.inflate import body_too_large
from prefixfleet.router.prompt import read_chat, read_completion
from prefixfleet.router.serve import serve_prompt
from prefixfleet.router.status import status_of

ROUTER = web.AppKey("router", Router)

log = logging.getLogger(__name__)

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


def make_app(router: Router) -> web.Application:
    """The application of an opened ``router``."""
    app = web.Application(
        client_max_size=router.settings.max_body_bytes, middlewares=[_answer_errors]
    )
    app[ROUTER] = router
    app.router.add_post("/v1/chat/completions", _chat_completions)
    app.router.add_post("/v1/completions", _completions)
    app.router.add_get("/v1/models", _models)
    app.router.add_get("/health", _health)
    app.router.add_get("/metrics", _metrics)
    app.router.add_get("/status", _status)
    return app


async def _chat_completions(request: web.Request) -> web.StreamResponse:
    return await serve_prompt(request.app[ROUTER], request, "chat", read_chat)


async def _completions(request: web.Request) -> web.StreamResponse:
    return await serve_prompt(request.app[ROUTER], request, "completion", read_completion)


async def _models(request: web.Request) -> web.Response:
    """Models of all workers that are not refused, each once."""
    models = {
        standing.record.model: standing.record.max_model_tokens
        for standing in request.app[ROUTER].roster.standings()
        if standing.state != "refused"
    }
    data = [
        {
            "id": model,
            "object": "model",
            "created": 0,
            "owned_by": "prefixfleet",
            "max_model_len": max_model_tokens,
        }
        for model, max_model_tokens in sorted(models.items())
    ]
    return _json({"object": "list", "data": data})


async def _health(request: web.Request) -> web.Response:
    """200 while some worker is ready, else 503: a balancer in front should look elsewhere."""
    states = Counter(s.state for s in request.app[ROUTER].roster.standings())
    healthy = states["ready"] > 0
    answer = {"status": "ok" if healthy else "no worker is ready", "workers": states}
    return _json(answer, status=200 if healthy else 503)


async def _metrics(request: web.Request) -> web.Response:
    router = request.app[ROUTER]
    router.metrics.read_gauges(router)
    return web.Response(
        body=router.metrics.render(),
        headers={"Content-Type": "text/plain; version=0.0.4; charset=utf-8"},
    )


async def _status(request: web.Request) -> web.Response:
    return _json(status_of(request.app[ROUTER]))


@web.middleware
async def _answer_errors(request: web.Request, handler: Handler) -> web.StreamResponse:
    router = request.app[ROUTER]
    route = request.match_info.route.resource
    name = route.canonical if route else "other"
    router.in_flight += 1
    status = 499  # the client left
    try:
        response = await _guarded(request, handler)
        status = response.status
        return response
    finally:
        router.in_flight -= 1
        router.metrics.requests.labels(name, f"{status}").inc()


async def _guarded(request: web.Request, handler: Handler) -> web.StreamResponse:
    try:
        return await handler(request)
    except Refusal as error:
        return refuse(error)
    except web.HTTPRequestEntityTooLarge:
        return refuse(body_too_large(request.app[ROUTER].settings.max_body_bytes))
    except web.HTTPNotFound:
        return refuse(NotFound(f"there is no {request.path!r:.200} here"))
    except web.HTTPMethodNotAllowed as error:
        answer = refuse(BadRequest(f"{request.path} takes {sorted(error.allowed_methods)}"))
        answer.set_status(405)
        answer.headers["Allow"] = ",".join(sorted(error.allowed_methods))
        return answer
    except (HttpProcessingError, web.RequestPayloadError) as error:
        return refuse(BadRequest(f"the body cannot be read: {error}"))
    except (ConnectionError, asyncio.CancelledError):
        raise  # the client is gone
    except Exception:
        log.exception("request failed: a fault of the router")
        return refuse(Refusal("the router failed; its log says why"))


def _json(value: object, status: int = 200) -> web.Response:
    return web.Response(body=msgspec.json.encode(value), status=status, content_type=JSON)
