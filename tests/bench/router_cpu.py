"""Processor time of a plain answer in the router's own code: ``python tests/bench/router_cpu.py``.

Without sockets: requests are put into `Lane`s and answers into `Connection`s, 32 at a time, in one
process. What is compared takes turns in short blocks, so that the ratio holds on a busy machine
too. The last line is one JSON object.
"""

import argparse
import asyncio
import gc
import itertools
import json
import logging
import os
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent / "support"))

import uvloop
from bench_client import MARK, bodies
from bench_upstream import NAMESPACE, PLAIN, SECRET
from chats import write_model
from eventually import until

from prefixfleet.router.__main__ import app_runner
from prefixfleet.router.connection import Connection
from prefixfleet.router.core import Router
from prefixfleet.router.examination import Examination
from prefixfleet.router.fleet import Fleet
from prefixfleet.router.garbage import look_seldom
from prefixfleet.router.lane import LaneServer
from prefixfleet.router.logs import BlockHandler
from prefixfleet.router.pool import Pool
from prefixfleet.router.settings import RouterSettings
from prefixfleet.router.worker import Worker
from prefixfleet.store.memory_index import MemoryIndex
from prefixfleet.store.records import WorkerRecord

AT_ONCE = 32
BLOCK = 10  # batches between two changes of what is measured
WARM_UP = 100
PYTHONS_OWN = (700, 10, 10)  # CPython 3.11


class Wire(asyncio.Transport):
    """A transport whose other end is a function, called in a turn of the loop of its own."""

    def __init__(self, heard: Callable[[bytes], None]) -> None:
        super().__init__()
        self._heard = heard

    def write(self, data: Any) -> None:
        asyncio.get_running_loop().call_soon(self._heard, data)

    def is_closing(self) -> bool:
        return False

    def abort(self) -> None:
        """Nothing is there to break."""

    close = abort


class OnePool(Pool):
    """Connects to engines that answer every request at once."""

    async def connect(self, url: str) -> Connection:
        connection = Connection(60.0)
        connection.connection_made(Wire(lambda _: connection.data_received(PLAIN)))
        self._busy.add(connection)
        return connection


class Listed:
    """Two workers, always the same."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    async def workers(self) -> list[WorkerRecord]:
        """See `Registry`."""
        return [self._worker(number) for number in range(2)]

    def _worker(self, number: int) -> WorkerRecord:
        return WorkerRecord(
            worker=f"w{number}",
            node=f"n{number}",
            url=f"http://127.0.0.1:{9_000 + number}",
            model="tiny",
            model_path=str(self._folder),
            namespace=asdict(NAMESPACE),
            block_bytes=1_000,
            max_model_tokens=100_000,
            prefill_tokens_per_s=1e6,
        )


class Belief(Examination):
    """Believes workers: these have no HTTP to be examined by."""

    async def examine(self, record: WorkerRecord) -> Worker:
        """The worker, unasked."""
        tokens = await self.tokens_of(record)
        return Worker(record, tokens, record.identity().digest(SECRET), NAMESPACE.block_tokens)


class Load:
    """Batches of requests, each answered before the next one begins."""

    def __init__(self, router: Router, server: LaneServer) -> None:
        self._router = router
        self._number = itertools.count(random.randrange(10**7))
        self._bodies = bodies("plain")
        self._left = 0
        self._lanes = [server() for _ in range(AT_ONCE)]
        for lane in self._lanes:
            lane.connection_made(Wire(self._answered))

    async def batch_us(self) -> float:
        """Processor time of one request."""
        asked = [self._request() for _ in self._lanes]
        self._left, self._done = AT_ONCE, asyncio.get_running_loop().create_future()
        began = time.thread_time()
        for lane, request in zip(self._lanes, asked, strict=True):
            lane.data_received(request)
        await self._done
        self._router.afterwards.catch_up()
        return 1e6 * (time.thread_time() - began) / AT_ONCE

    def _request(self) -> bytes:
        number = next(self._number)
        body = self._bodies[number % len(self._bodies)]
        body = body.replace(MARK.encode(), b"group %08d" % (number % 10**8))
        head = b"POST /v1/chat/completions HTTP/1.1\r\nhost: r\r\ncontent-length: %d\r\n\r\n"
        return head % len(body) + body

    def _answered(self, data: bytes) -> None:
        if not data.startswith(b"HTTP/1.1 200"):
            raise RuntimeError(f"an answer that is no 200: {data[:200]!r}")
        self._left -= 1
        if not self._left:
            self._done.set_result(None)


async def measure(folder: Path, blocks: int) -> dict[str, float]:
    """Microseconds a request, with the rate of garbage collection that Python has and with ours."""
    fleet = Fleet(MemoryIndex(), Listed(write_model(folder / "model")), SECRET)
    router = Router(fleet, RouterSettings(port=0, health_interval_s=0))
    router.examination = Belief(SECRET, None, dict, lambda: router.session)
    async with router:
        router.pool = OnePool(connect_timeout_s=1.0, silence_timeout_s=60.0)
        await until(lambda: all(s.state == "ready" for s in router.roster.standings()))
        runner = app_runner(router)
        await runner.setup()
        assert isinstance(runner.server, LaneServer)
        load = Load(router, runner.server)
        for _ in range(WARM_UP):
            await load.batch_us()
        seen: dict[str, list[list[float]]] = {"own": [], "seldom": []}
        for _, name in itertools.product(range(blocks), seen):
            look_seldom()
            if name == "own":
                gc.unfreeze()
                gc.set_threshold(*PYTHONS_OWN)
            seen[name].append([await load.batch_us() for _ in range(BLOCK)])
        await runner.cleanup()
    own, seldom = (list(map(statistics.fmean, seen[name])) for name in ("own", "seldom"))
    return {
        "plain_us": statistics.median(seldom),
        "plain_min_us": min(map(min, seen["seldom"])),
        "seldom_over_own": statistics.median(s / o for s, o in zip(seldom, own, strict=True)),
    }


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument("--json", action="store_true", help="for all benches alike: no effect")
    arguments.add_argument("--blocks", type=int, default=30)
    chosen = arguments.parse_args()
    with open(os.devnull, "w") as nowhere, tempfile.TemporaryDirectory() as folder:
        logging.basicConfig(level=logging.INFO, handlers=[BlockHandler(nowhere)])
        print(json.dumps(uvloop.run(measure(Path(folder), chosen.blocks))))


if __name__ == "__main__":
    main()
