"""The router's own OpenAPI document, made from its routes: what it promises of each, and no more.

Requests and answers of engines pass through: of them it says what routing needs (a JSON object
that names a model), and leaves the rest to the engine's own document.
"""

from typing import Any

import msgspec
from aiohttp import web

from prefixfleet.router.errors import JSON
from prefixfleet.router.routes import ROUTES, Route

_JSON_OBJECT = {"type": "object"}
_OPENAI_ERROR = {
    "type": "object",
    "required": ["error"],
    "properties": {
        "error": {
            "type": "object",
            "required": ["message", "type", "param", "code"],
            "properties": {
                "message": {"type": "string"},
                "type": {"type": "string"},
                "param": {"type": ["string", "null"]},
                "code": {"type": ["string", "integer", "null"]},
            },
        }
    },
}
_ANTHROPIC_ERROR = {
    "type": "object",
    "required": ["type", "error"],
    "properties": {
        "type": {"const": "error"},
        "error": {
            "type": "object",
            "required": ["type", "message"],
            "properties": {"type": {"type": "string"}, "message": {"type": "string"}},
        },
    },
}
_MODEL_REQUEST = {
    "type": "object",
    "required": ["model"],
    "properties": {"model": {"type": "string"}},
    "additionalProperties": True,
}
_KEY = "a client key, where the router has any"
_ADMIN_KEY = "the admin key"


def add_openapi(app: web.Application) -> None:
    """Serve the document at ``/openapi.json``."""
    body = msgspec.json.encode(document())

    async def page(_request: web.Request) -> web.Response:
        return web.Response(body=body, content_type=JSON)

    app.router.add_get("/openapi.json", page)


def document() -> dict[str, Any]:
    """OpenAPI 3.1; the dashboard and its files, which are for browsers, are not in it."""
    served = {route.path: {"post": _served(route)} for route in ROUTES}
    return {
        "openapi": "3.1.0",
        "info": {"title": "prefixfleet router", "version": "1"},
        "paths": served | _stored() | _pages() | _admin(),
        "components": {
            "schemas": {"OpenAIError": _OPENAI_ERROR, "AnthropicError": _ANTHROPIC_ERROR},
            "securitySchemes": {
                "client": {"type": "http", "scheme": "bearer", "description": _KEY},
                "admin": {"type": "http", "scheme": "bearer", "description": _ADMIN_KEY},
            },
        },
    }


def _served(route: Route) -> dict[str, Any]:
    """What goes to an engine: its answer comes back as it is, with its own errors."""
    return {
        "summary": f"Routed to an engine ({route.name})",
        "security": [{"client": []}, {}],
        "requestBody": {"required": True, "content": {JSON: {"schema": _MODEL_REQUEST}}},
        "responses": {
            "200": {
                "description": "The engine's answer, as it came",
                "content": {JSON: {"schema": {}}, "text/event-stream": {"schema": {}}},
            },
            **_refusals(
                route.path, "400", "401", "404", "408", "413", "415", "429", "502", "503", "504"
            ),
            "default": {"description": "The engine's own refusal, as it came"},
        },
    }


def _stored() -> dict[str, Any]:
    """What only the engine that keeps a response can answer."""
    path = "/v1/responses/{id}"
    passed = {
        "200": {
            "description": "The engine's answer, as it came",
            "content": {JSON: {"schema": {}}, "text/event-stream": {"schema": {}}},
        },
        **_refusals(path, "401", "404", "408", "413", "415", "429", "503"),
        "default": {"description": "The engine's own refusal, as it came"},
    }
    common = {"security": [{"client": []}, {}], "parameters": [_named("id")], "responses": passed}
    return {
        path: {"get": {"summary": "A stored response, from the worker that keeps it", **common}},
        f"{path}/cancel": {"post": {"summary": "Stop one that runs in the background", **common}},
    }


def _pages() -> dict[str, Any]:
    unready = {"503": {"description": "No worker is ready", "content": _content(_JSON_OBJECT)}}
    pages = {
        "/v1/models": _page("Models of the workers"),
        "/v1/models/{model}": _page("One of them", **_refusals("/v1/models", "404"))
        | {"parameters": [_named("model")]},
        "/health": _page("Whether a worker is ready", **unready),
        "/status": _page("Nodes, workers with their loads, hit rate, degraded modes"),
        "/openapi.json": _page("This document"),
        "/metrics": _page("Prometheus text", content={"text/plain": {"schema": {}}}),
    }
    return {path: {"get": page} for path, page in pages.items()}


def _admin() -> dict[str, Any]:
    workers = "/admin/workers"
    one = f"{workers}/{{name}}"
    entry = {"required": True, "content": _content(_JSON_OBJECT)}
    wish = {"required": True, "content": _content(_MODEL_REQUEST)}
    return {
        "/admin/pins": {
            "post": _order("Keep a prefix where it is", "200", "400", "413", requestBody=wish),
            "delete": _order("Keep it no longer", "200", "400", "413", requestBody=wish),
        },
        workers: {
            "get": _order("Every worker and its state"),
            "post": _order("Add a plain engine", "201", "400", "409", requestBody=entry),
        },
        one: {"delete": _order("Take a worker out", "200", "404", named=True)},
        f"{one}/drain": {"post": _order("No new requests", "200", "404", named=True)},
        f"{one}/resume": {"post": _order("Requests again", "200", "404", named=True)},
        f"{one}/flush": {
            "post": _order("Drop its own cache", "200", "404", "501", "502", named=True)
        },
    }


def _page(summary: str, *, content: dict[str, Any] | None = None, **more: Any) -> dict[str, Any]:  # noqa: ANN401 - responses by status
    ok = {"description": summary, "content": content or _content(_JSON_OBJECT)}
    return {"summary": summary, "responses": {"200": ok, **more}}


def _order(
    summary: str,
    success: str = "200",
    *failures: str,
    named: bool = False,
    **more: Any,  # noqa: ANN401 - of the operation
) -> dict[str, Any]:
    done = {"description": summary, "content": _content(_JSON_OBJECT)}
    refusals = _refusals("/admin", "401", "403", "404", "405", "503", *failures)
    return {
        "summary": summary,
        "security": [{"admin": []}],
        "parameters": [_named("name")] if named else [],
        "responses": {success: done, **refusals},
        **more,
    }


def _named(part: str) -> dict[str, Any]:
    return {"name": part, "in": "path", "required": True, "schema": {"type": "string"}}


def _refusals(path: str, *statuses: str) -> dict[str, Any]:
    """The router's own, in the shape that the path's clients understand."""
    kind = "AnthropicError" if path.startswith("/v1/messages") else "OpenAIError"
    schema = {"$ref": f"#/components/schemas/{kind}"}
    return {status: {"description": "Refused", "content": _content(schema)} for status in statuses}


def _content(schema: dict[str, Any]) -> dict[str, Any]:
    return {JSON: {"schema": schema}}
