"""Routes, and the one place where an exception becomes an answer in the OpenAI error shape."""

import asyncio
import logging
from collections.abc import Awaitable, Callable
from pathlib import Path

from aiohttp import HttpVersion11, web
from aiohttp.http_exceptions import HttpProcessingError

from prefixfleet.router import pages
from prefixfleet.router.admin import add_admin
from prefixfleet.router.client import CALLED, ID, WAITS, AnyClient
from prefixfleet.router.core import Router
from prefixfleet.router.dashboard import add_dashboard
from prefixfleet.router.edge import NO_ROUTE
from prefixfleet.router.errors import BadRequest, NotFound, Refusal, refusal, refuse
from prefixfleet.router.headers import REQUEST_ID, AnswerHeaders, request_id_of
from prefixfleet.router.inflate import body_too_large
from prefixfleet.router.lane_client import LaneClient
from prefixfleet.router.openapi import add_openapi
from prefixfleet.router.pages import ROUTER
from prefixfleet.router.plain_request import MAX_BODY_BYTES
from prefixfleet.router.routes import ROUTES, Route, is_anthropic
from prefixfleet.router.serve import serve_prompt
from prefixfleet.router.stored import serve_stored

log = logging.getLogger(__name__)

_OWN_FAULT = "request %s failed: a fault of the router"
_TOLD = "the router failed; its log says why"

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


def make_app(router: Router, sibling_socket: Path | None = None) -> web.Application:
    """The application of an opened ``router``; ``sibling_socket`` says who shares its port."""
    app = web.Application(
        client_max_size=router.settings.max_body_bytes, middlewares=[_answer_errors]
    )
    app[ROUTER] = router
    app.on_response_prepare.append(_say_its_name)
    for route in ROUTES:
        app.router.add_post(route.path, _serving(route), expect_handler=_expects)
    app.router.add_get("/v1/responses/{id:[^/]+}", _stored)
    app.router.add_post("/v1/responses/{id:[^/]+}/cancel", _stored, expect_handler=_expects)
    app.router.add_get("/v1/models", pages.models)
    app.router.add_get("/v1/models/{model:.+}", pages.model)
    app.router.add_get("/health", pages.health)
    app.router.add_get("/metrics", pages.metrics_of(sibling_socket))
    app.router.add_get("/status", pages.status)
    add_admin(app)
    add_dashboard(app)
    add_openapi(app)
    app.router.add_route("OPTIONS", "/{path:.*}", _options)
    return app


async def _expects(request: web.Request) -> None:
    """``Expect``: the body may come when it is read, and not before its client was admitted."""
    expected = request.headers["Expect"]
    if request.version >= HttpVersion11:
        if expected.lower() != "100-continue":
            raise web.HTTPExpectationFailed(text=f"Unknown Expect: {expected}")
        request[WAITS] = True


def _serving(route: Route) -> Handler:
    async def serve(request: web.Request) -> web.StreamResponse:
        router = request.app[ROUTER]
        client = AnyClient(request, router.settings.max_body_bytes)
        await serve_prompt(router, client, route)
        return client.response

    return serve


async def _stored(request: web.Request) -> web.StreamResponse:
    router = request.app[ROUTER]
    client = AnyClient(request, router.settings.max_body_bytes)
    await serve_stored(router, client, request.match_info["id"], request.method)
    return client.response


def lane_routes(router: Router) -> dict[str, Callable[[LaneClient], Awaitable[None]]]:
    """What a `Lane` serves itself, by path: the same, for plain requests."""
    most = router.settings.max_body_bytes

    def serving(route: Route) -> Callable[[LaneClient], Awaitable[None]]:
        return lambda client: _serve_plain(router, client, route)

    return {route.path: serving(route) for route in ROUTES} if most >= MAX_BODY_BYTES else {}


async def _serve_plain(router: Router, client: LaneClient, route: Route) -> None:
    router.in_flight += 1
    client.id = router.new_id()
    client.called = request_id_of(client.headers) or client.id
    status = 499  # the client left
    try:
        status = await _guarded_plain(router, client, route)
    finally:
        _ended(router, route.path, status)


def _ended(router: Router, route: str, status: int) -> None:
    router.in_flight -= 1
    metrics = router.metrics
    router.afterwards.note(metrics.labelled(metrics.requests, route, f"{status}").inc)
    if not router.in_flight:
        router.afterwards.catch_up()


async def _guarded_plain(router: Router, client: LaneClient, route: Route) -> int:
    try:
        return await serve_prompt(router, client, route)
    except Refusal as refused:
        error = refused
    except (ConnectionError, asyncio.CancelledError):
        raise  # the client is gone
    except Exception:
        log.exception(_OWN_FAULT, client.called)
        error = Refusal(_TOLD)
    if client.begun:
        client.hang_up()
        return error.status
    headers, body = refusal(error, anthropic=is_anthropic(route.path))
    headers[REQUEST_ID] = client.called
    client.answer(error.status, AnswerHeaders(headers), body)
    return error.status


async def _say_its_name(request: web.Request, response: web.StreamResponse) -> None:
    if CALLED in request:
        response.headers.setdefault(REQUEST_ID, request[CALLED])


async def _options(request: web.Request) -> web.Response:
    """Which methods a path takes."""
    own = request.match_info.route.resource
    allowed: set[str] = set()
    for resource in request.app.router.resources():
        if resource is not own:
            allowed |= (await resource.resolve(request))[1]
    if not allowed:
        raise web.HTTPNotFound
    return web.Response(status=204, headers={"Allow": ",".join(sorted({*allowed, "OPTIONS"}))})


@web.middleware
async def _answer_errors(request: web.Request, handler: Handler) -> web.StreamResponse:
    router = request.app[ROUTER]
    route = request.match_info.route.resource
    name = route.canonical if route else NO_ROUTE
    request[ID] = router.new_id()
    request[CALLED] = request_id_of(request.headers) or request[ID]
    router.in_flight += 1
    status = 499  # the client left
    try:
        response = await _guarded(request, handler)
        status = response.status
        return response
    finally:
        _ended(router, name, status)


async def _guarded(request: web.Request, handler: Handler) -> web.StreamResponse:
    try:
        return await handler(request)
    except Refusal as error:
        return _refuse(request, error)
    except web.HTTPRequestEntityTooLarge:
        return _refuse(request, body_too_large(request.app[ROUTER].settings.max_body_bytes))
    except web.HTTPNotFound:
        return _refuse(request, _not_found(request))
    except web.HTTPMethodNotAllowed as error:
        if error.allowed_methods == {"OPTIONS"}:
            return _refuse(request, _not_found(request))
        answer = _refuse(
            request, BadRequest(f"{request.path} takes {sorted(error.allowed_methods)}")
        )
        answer.set_status(405)
        answer.headers["Allow"] = ",".join(sorted(error.allowed_methods))
        return answer
    except (HttpProcessingError, web.RequestPayloadError) as error:
        return _refuse(request, BadRequest(f"the body cannot be read: {error}"))
    except (ConnectionError, asyncio.CancelledError):
        raise  # the client is gone
    except Exception:
        log.exception(_OWN_FAULT, request[CALLED])
        return _refuse(request, Refusal(_TOLD))


def _not_found(request: web.Request) -> NotFound:
    return NotFound(f"there is no {request.path!r:.200} here")


def _refuse(request: web.Request, error: Refusal) -> web.Response:
    """In the shape that the route's clients understand."""
    response = refuse(error, anthropic=is_anthropic(request.path))
    if request.get(WAITS):  # its body may come or not: what comes next cannot be told from it
        response.force_close()
    return response
