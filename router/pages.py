"""What the router says of itself: models, health, metrics, status."""

from collections import Counter
from collections.abc import Awaitable, Callable
from pathlib import Path

import msgspec
from aiohttp import web

from prefixfleet.router.core import Router
from prefixfleet.router.errors import JSON, UnknownModel
from prefixfleet.router.siblings import all_metrics
from prefixfleet.router.status import status_of
from prefixfleet.store.records import WorkerRecord

ROUTER = web.AppKey("router", Router)


async def models(request: web.Request) -> web.Response:
    """Models of all workers that are not refused, each once."""
    found = _models(request.app[ROUTER])
    return _json({"object": "list", "data": [found[name] for name in sorted(found)]})


async def model(request: web.Request) -> web.Response:
    """One of them. Raises `UnknownModel`."""
    name, found = request.match_info["model"], _models(request.app[ROUTER])
    if name not in found:
        raise UnknownModel(f"there is no model {name!r:.200}; GET /v1/models lists them")
    return _json(found[name])


def _models(router: Router) -> dict[str, dict[str, object]]:
    """Adapters too, each with the model that it belongs to. A model's own name comes first."""
    standings = [s for s in router.roster.standings() if s.state != "refused"]
    standings.sort(key=lambda standing: standing.record.model)
    found = {standing.record.model: _card(standing.record) for standing in standings}
    for standing in standings:
        for name in standing.adapters:
            found.setdefault(name, _card(standing.record, name))
    return found


def _card(record: WorkerRecord, adapter: str = "") -> dict[str, object]:
    return {
        "id": adapter or record.model,
        "object": "model",
        "created": 0,
        "owned_by": "prefixfleet",
        "max_model_len": record.max_model_tokens,
    } | ({"parent": record.model} if adapter else {})


async def health(request: web.Request) -> web.Response:
    """200 while some worker is ready, else 503: a balancer in front should look elsewhere."""
    states = Counter(s.state for s in request.app[ROUTER].roster.standings())
    healthy = states["ready"] > 0
    answer = {"status": "ok" if healthy else "no worker is ready", "workers": states}
    return _json(answer, status=200 if healthy else 503)


def metrics_of(
    sibling_socket: Path | None,
) -> Callable[[web.Request], Awaitable[web.Response]]:
    """The page with Prometheus text: of all processes, if several share the port."""

    async def metrics(request: web.Request) -> web.Response:
        router = request.app[ROUTER]
        router.metrics.read_gauges(router)
        body = await all_metrics(sibling_socket) if sibling_socket else router.metrics.render()
        return web.Response(
            body=body, headers={"Content-Type": "text/plain; version=0.0.4; charset=utf-8"}
        )

    return metrics


async def status(request: web.Request) -> web.Response:
    """See `status_of`."""
    return _json(status_of(request.app[ROUTER]))


def _json(value: object, status: int = 200) -> web.Response:
    return web.Response(body=msgspec.json.encode(value), status=status, content_type=JSON)
