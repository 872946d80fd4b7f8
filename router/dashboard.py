"""The dashboard's HTTP side: the page, a snapshot of the fleet, and a stream of decisions.

The page holds no data and is open to all. The data are open where no API keys are set; else they
need a key whose entry says ``dashboard``: they show every tenant's traffic, as numbers and hashes.
"""

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from importlib import resources
from typing import Any

import msgspec
from aiohttp import web

from prefixfleet.router.activity import Seen, Watcher
from prefixfleet.router.core import Router
from prefixfleet.router.errors import JSON, NotFound, TooBusy, Unauthorized
from prefixfleet.router.pages import ROUTER
from prefixfleet.router.percentiles import spread
from prefixfleet.router.status import status_of

MAX_WATCHERS = 32
MAX_LINKS = 200
SHOWN_DECISIONS = 100
BINS = 20
BEAT_S = 10.0
"""Silence after which the stream says that it lives: a reader notices a dead router by it."""

STALLED_S = 30.0  # a reader that takes nothing for so long is let go

FILES = {
    "dashboard.js": "text/javascript",
    "dashboard_charts.js": "text/javascript",
    "dashboard.css": "text/css",
    "uplot.min.js": "text/javascript",
    "uplot.min.css": "text/css",
}
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
    "img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)


class _Streams:
    """Tasks that stream decisions. Owned by the application."""

    def __init__(self) -> None:
        self.tasks: set[asyncio.Task[Any]] = set()

    async def end(self, _: web.Application) -> None:
        """Streams have no end of their own: without this a router that stops would wait."""
        for task in list(self.tasks):
            task.cancel()

    @contextmanager
    def ended_at_shutdown(self) -> Iterator[None]:
        """The task that runs this block is cancelled when the application stops."""
        task = asyncio.current_task()
        assert task is not None
        self.tasks.add(task)
        try:
            yield
        finally:
            self.tasks.discard(task)


_STREAMS = web.AppKey("dashboard_streams", _Streams)


def add_dashboard(app: web.Application) -> None:
    """Add the routes to ``app``."""
    app[_STREAMS] = streams = _Streams()
    app.on_shutdown.append(streams.end)
    app.router.add_get("/dashboard", _page)
    app.router.add_get("/dashboard/snapshot", _snapshot)
    app.router.add_get("/dashboard/events", _events)
    app.router.add_get("/dashboard/{file}", _file)


def snapshot_of(router: Router) -> dict[str, Any]:
    """Everything that the dashboard and `prefixfleet top` show, as JSON."""
    status, activity = status_of(router), router.activity
    links = _links(status["nodes"])
    for node in status["nodes"]:
        stats = node["stats"]
        node["stats"] = {k: stats[k] for k in ("tiers", "engines", "degraded") if k in stats}
    seen = activity.decisions()
    timed = [s for s in seen if s.ttft_s is not None]
    return {
        **status,
        "waiting": len(router.turns),
        "requests": activity.requests,
        "tokens": activity.tokens,
        "hit_histogram": _histogram(list(router.hit_ratios)),
        "ttft_s": {
            "observed": _seconds([s.ttft_s for s in timed if s.ttft_s is not None]),
            "estimated": _seconds([s.estimate_s for s in timed]),
            "without_cache": _seconds([s.cold_s for s in timed]),
        },
        "series": activity.series(),
        "prefixes": activity.prefixes.tree(router.clock()),
        "links": links[:MAX_LINKS],
        "links_total": len(links),
        "decisions": [asdict(s) for s in seen[-SHOWN_DECISIONS:]],
    }


def _seconds(values: list[float]) -> dict[str, float]:
    return {"count": len(values)} | spread(values)


def _links(nodes: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Measured links, the most used first."""
    found = [
        {
            "to": node["node"],
            "from": source,
            "link": name,
            "bytes_per_s": speed.get("bytes_per_s", 0.0),
            "setup_s": speed.get("setup_s", 0.0),
            "pulls": speed.get("pulls", 0),
        }
        for node in nodes
        for source, measured in node["stats"].get("links", {}).items()
        for name, speed in measured.get("links", {}).items()
    ]
    return sorted(found, key=lambda link: -link["pulls"])


def _histogram(ratios: list[float]) -> list[int]:
    """Requests by hit ratio, in `BINS` equal bins of 0 to 1."""
    bins = [0] * BINS
    for ratio in ratios:
        bins[min(BINS - 1, int(ratio * BINS))] += 1
    return bins


async def _page(request: web.Request) -> web.Response:
    return _packaged("dashboard.html", "text/html")


async def _file(request: web.Request) -> web.Response:
    name = request.match_info["file"]
    if name not in FILES:
        raise NotFound(f"there is no {request.path!r:.200} here")
    return _packaged(name, FILES[name])


def _packaged(name: str, kind: str) -> web.Response:
    text = resources.files("prefixfleet.router").joinpath(name).read_text(encoding="utf-8")
    headers = {
        "Cache-Control": "no-cache",
        "Content-Security-Policy": POLICY,
        "X-Content-Type-Options": "nosniff",
        "Referrer-Policy": "no-referrer",
    }
    return web.Response(text=text, content_type=kind, charset="utf-8", headers=headers)


def _admit(request: web.Request) -> Router:
    """The router, for somebody who may watch it. Raises `Unauthorized`."""
    router = request.app[ROUTER]
    key = router.files.keys.check(request.headers.get("Authorization"))
    if router.files.keys.path is not None and not key.dashboard:
        raise Unauthorized("this API key may not watch the fleet: its entry lacks 'dashboard'")
    return router


async def _snapshot(request: web.Request) -> web.Response:
    body = msgspec.json.encode(snapshot_of(_admit(request)))
    return web.Response(body=body, content_type=JSON, headers={"Cache-Control": "no-store"})


async def _events(request: web.Request) -> web.StreamResponse:
    router = _admit(request)
    if router.activity.watchers >= MAX_WATCHERS:
        raise TooBusy(f"{MAX_WATCHERS} readers follow the decisions already", retry_after_s=10.0)
    headers = {"Content-Type": "text/event-stream", "Cache-Control": "no-store"}
    response = web.StreamResponse(headers=headers)
    with router.activity.watched() as watcher, request.app[_STREAMS].ended_at_shutdown():
        await response.prepare(request)
        event = b": hello\n\n"
        while True:
            async with asyncio.timeout(STALLED_S):
                await response.write(event)
            event = await _next_event(watcher)


async def _next_event(watcher: Watcher) -> bytes:
    try:
        async with asyncio.timeout(BEAT_S):
            return _event(await watcher.unread.get(), watcher.missed)
    except TimeoutError:
        return b": alive\n\n"


def _event(seen: Seen, missed: int) -> bytes:
    data = msgspec.json.encode({**asdict(seen), "missed": missed})
    return b"event: request\ndata: " + data + b"\n\n"
