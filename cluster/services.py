"""A node daemon and a worker as services: what actors and terminals run."""

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import asdict
from typing import Any

from prefixfleet.cluster.hosted import Service
from prefixfleet.cluster.links import open_links
from prefixfleet.cluster.node import NodeDaemon
from prefixfleet.cluster.settings import NodeSettings, WorkerSettings
from prefixfleet.cluster.worker import Worker
from prefixfleet.store.index import ENGINE_AREA
from prefixfleet.store.redis_index import RedisIndex
from prefixfleet.store.registry import WorkerRegistry
from prefixfleet.store.settings import FleetSettings

Up = Callable[[dict[str, Any]], None]


def node_service(environ: Mapping[str, str]) -> Service:
    """A node daemon with the settings in ``environ``. Raises `ConfigError` when it runs."""

    async def serve(up: Up, stop: asyncio.Event) -> None:
        settings, fleet = NodeSettings.read(environ), FleetSettings.read(environ)
        secret = fleet.secret()
        url = fleet.redis_url.get_secret_value()
        index, engines = (
            RedisIndex(url, fleet.fleet),
            RedisIndex(url, fleet.fleet, area=ENGINE_AREA),
        )
        try:
            links = open_links(settings, secret)
            daemon = NodeDaemon(settings, secret, index, links, engine_index=engines)
            async with daemon:
                up({"node": settings.name, "http": daemon.url})
                await daemon.wait(stop)
        finally:
            await index.close()
            await engines.close()

    return serve


def worker_service(environ: Mapping[str, str]) -> Service:
    """A worker with the settings in ``environ``; told to stop, it drains first.

    Raises `ConfigError` or `EngineFailed` when it runs.
    """

    async def serve(up: Up, stop: asyncio.Event) -> None:
        settings, fleet = WorkerSettings.read(environ), FleetSettings.read(environ)
        url, secret = fleet.redis_url.get_secret_value(), fleet.secret()
        index = RedisIndex(url, fleet.fleet)
        registry = WorkerRegistry(url, fleet.fleet, secret=secret)
        worker = Worker(settings, index, registry)
        running = asyncio.create_task(worker.run())
        stopping = asyncio.create_task(stop.wait())
        worker.ready.add_done_callback(
            lambda ready: None if ready.exception() else up(asdict(ready.result()))
        )
        try:
            await asyncio.wait({running, stopping}, return_when=asyncio.FIRST_COMPLETED)
            if running.done():
                running.result()  # raises what ended it
            await worker.drain()
        finally:
            running.cancel()
            stopping.cancel()
            await asyncio.gather(running, stopping, return_exceptions=True)
            await index.close()
            await registry.close()

    return serve
