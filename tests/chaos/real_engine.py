"""A real vLLM engine of a chaos run, as a process: the worker, whose engine is reached by a proxy.

Usage: real_engine.py ADVERTISED_URL; settings from the environment.
"""

import asyncio
import os
import signal
import sys
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from prefixfleet.cluster.settings import WorkerSettings
from prefixfleet.cluster.worker import Worker
from prefixfleet.store.records import WorkerRecord
from prefixfleet.store.redis_index import RedisIndex
from prefixfleet.store.registry import WorkerRegistry
from prefixfleet.store.settings import FleetSettings


class ProxiedWorker(Worker):
    """A worker that is named by the proxy in front of it."""

    advertised = ""

    def _record(self, status: Mapping[str, Any], speed: float) -> WorkerRecord:
        return replace(super()._record(status, speed), url=self.advertised)


async def main(advertised: str) -> None:
    stop, loop = asyncio.Event(), asyncio.get_running_loop()
    loop.add_signal_handler(signal.SIGTERM, stop.set)
    settings, fleet = WorkerSettings.read(os.environ), FleetSettings.read(os.environ)
    url = fleet.redis_url.get_secret_value()
    index, registry = (
        RedisIndex(url, fleet.fleet),
        WorkerRegistry(url, fleet.fleet, secret=fleet.secret()),
    )
    worker = ProxiedWorker(settings, index, registry)
    worker.advertised = advertised
    running, stopping = asyncio.create_task(worker.run()), asyncio.create_task(stop.wait())
    try:
        await asyncio.wait({running, stopping}, return_when=asyncio.FIRST_COMPLETED)
        if running.done():
            running.result()  # raises what ended it
    finally:
        for task in (running, stopping):
            task.cancel()
        await asyncio.gather(running, stopping, return_exceptions=True)
        await index.close()
        await registry.close()


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1]))
