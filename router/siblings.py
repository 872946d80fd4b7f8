"""Metrics of all processes that share this one's port, in one answer.

A scrape reaches any of them: counters that belong to one process only would jump. Each process
serves its own metrics on a Unix socket beside the others', and whoever is asked joins them, with
a label ``process``.
"""

import asyncio
from collections.abc import Iterable, Mapping
from pathlib import Path

import aiohttp
from aiohttp import web
from prometheus_client import Metric
from prometheus_client.exposition import generate_latest
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.registry import Collector, CollectorRegistry

from prefixfleet.router.core import Router

TIMEOUT = aiohttp.ClientTimeout(total=2.0)


async def serve_siblings(router: Router, socket: Path) -> web.AppRunner:
    """Serve this process's own metrics on ``socket``; clean the runner up at the end."""

    async def own(_request: web.Request) -> web.Response:
        router.metrics.read_gauges(router)
        return web.Response(body=router.metrics.render())

    app = web.Application()
    app.router.add_get("/metrics", own)
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    await web.UnixSite(runner, str(socket)).start()
    return runner


async def all_metrics(socket: Path) -> bytes:
    """Metrics of every process whose socket lies beside ``socket``; those that end are left out."""
    sockets = sorted(socket.parent.glob("*.sock"))
    texts = await asyncio.gather(*map(_metrics_of, sockets))
    return joined({path.stem: text for path, text in zip(sockets, texts, strict=True) if text})


async def _metrics_of(socket: Path) -> str:
    try:
        async with (
            aiohttp.ClientSession(connector=aiohttp.UnixConnector(str(socket))) as session,
            session.get("http://sibling/metrics", timeout=TIMEOUT) as response,
        ):
            return await response.text()
    except (TimeoutError, aiohttp.ClientError, OSError):
        return ""


def joined(texts: Mapping[str, str]) -> bytes:
    """Text expositions by process, as one with a label ``process``."""
    families: dict[str, Metric] = {}
    for process, text in texts.items():
        for family in text_string_to_metric_families(text):
            whole = families.setdefault(
                family.name, Metric(family.name, family.documentation, family.type)
            )
            for sample in family.samples:
                labels = {**sample.labels, "process": process}
                whole.add_sample(sample.name, labels, sample.value)
    registry = CollectorRegistry()
    registry.register(_Fixed(families.values()))
    return generate_latest(registry)


class _Fixed(Collector):
    def __init__(self, families: Iterable[Metric]) -> None:
        self._families = list(families)

    def collect(self) -> Iterable[Metric]:
        return self._families
