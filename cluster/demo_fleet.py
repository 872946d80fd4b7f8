"""What the demo sees of a running fleet: who is there, and what became of a request."""

import asyncio
import time
from dataclasses import dataclass
from typing import Any

import aiohttp

from prefixfleet.cluster.demo_ask import Asker
from prefixfleet.store.errors import ConfigError
from prefixfleet.store.index import PrefixIndex
from prefixfleet.store.records import Outcome
from prefixfleet.store.registry import WorkerRegistry

WAIT_S = 20.0
LOOK_S = 0.05


@dataclass(frozen=True, slots=True)
class Seat:
    """One node with its engine."""

    node: str
    http: str  # of the daemon
    engine: Asker
    epoch: int
    block_tokens: int


class DemoFleet:
    """Owned by the demo; close it."""

    def __init__(self, router_url: str, model: str, seats: list[Seat]) -> None:
        self.seats = seats
        self.router = Asker(router_url, model)
        self._router_url = router_url
        self._session = aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(WAIT_S))

    @classmethod
    async def find(
        cls, router_url: str, index: PrefixIndex, registry: WorkerRegistry
    ) -> "DemoFleet":
        """The fleet behind ``router_url``. Raises `ConfigError` if it has fewer than two nodes."""
        workers = {worker.node: worker for worker in await registry.workers()}
        seats = [
            Seat(
                node=member.node,
                http=record.http,
                engine=Asker(workers[member.node].url, workers[member.node].model),
                epoch=member.epoch,
                block_tokens=workers[member.node].identity().block_tokens,
            )
            for member, record in await index.members()
            if member.node in workers
        ]
        if len(seats) < 2:
            raise ConfigError(f"demo: the fleet has {len(seats)} nodes with an engine, expected 2")
        model = next(iter(workers.values())).model
        return cls(router_url, model, sorted(seats, key=lambda seat: seat.node))

    async def close(self) -> None:
        """Close every connection."""
        await self._session.close()
        for asker in (self.router, *(seat.engine for seat in self.seats)):
            await asker.close()

    def seat(self, node: str) -> Seat:
        """The seat of a node."""
        return next(seat for seat in self.seats if seat.node == node)

    async def router_status(self) -> dict[str, Any]:
        """The router's own view."""
        return await self._json(f"{self._router_url}/status")

    async def node_status(self, seat: Seat) -> dict[str, Any]:
        """What the node's daemon says."""
        return await self._json(f"{seat.http}/status")

    async def committed(self, seat: Seat) -> int:
        """Blocks that were ever committed to the node's pool."""
        return int((await self.node_status(seat))["stats"]["cache"]["committed_blocks"])

    async def wait_committed(self, seat: Seat, at_least: int) -> None:
        """Wait until the node holds what an engine just computed; saves run behind the answer."""
        deadline = time.monotonic() + WAIT_S
        while await self.committed(seat) < at_least:
            if time.monotonic() > deadline:
                raise ConfigError(f"demo: node {seat.node} did not keep its blocks in {WAIT_S:g} s")
            await asyncio.sleep(LOOK_S)

    async def outcome(self, seat: Seat, request: str) -> Outcome | None:
        """What became of a request's prefix on its node; None if the node has not said."""
        deadline = time.monotonic() + WAIT_S / 10
        while time.monotonic() < deadline:
            for values in reversed((await self.node_status(seat))["outcomes"]):
                if values["request"] == request:
                    return Outcome(**values)
            await asyncio.sleep(LOOK_S)
        return None

    async def _json(self, url: str) -> dict[str, Any]:
        async with self._session.get(url) as response:
            values: dict[str, Any] = await response.json()
            return values
