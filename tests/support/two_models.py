"""Engines of two models with blocks of two sizes, for tests of a node that both share."""

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import asdict, replace
from typing import Any

from eventually import until
from node_rig import NAMESPACE, PlainEngine, payload_of

from prefixfleet.cluster.node import NodeDaemon
from prefixfleet.store.chain import BlockHash
from prefixfleet.store.records import PullPlan

POOL_BYTES = 12 << 20
SMALL = {"namespace": asdict(NAMESPACE), "payload_bytes": 8_000}  # slots of two pages
LARGE = {  # of three
    "namespace": asdict(replace(NAMESPACE, weights="of the large one", model="large")),
    "payload_bytes": 12_000,
}


@asynccontextmanager
async def both_at(daemon: NodeDaemon) -> AsyncIterator[tuple[PlainEngine, PlainEngine]]:
    """An engine of each model, the second one's memory here."""
    socket = daemon.settings.socket_path
    async with (
        PlainEngine.connected(socket, engine="small", **SMALL) as small,
        PlainEngine.connected(socket, engine="large", **LARGE) as large,
    ):
        await until(lambda: kind(daemon, large)["slabs"] == 4)
        yield small, large


def kind(daemon: NodeDaemon, engine: PlainEngine) -> dict[str, Any]:
    found: dict[str, Any] = daemon.snapshot()["kinds"][engine.welcome["namespace_digest"].hex()]
    return found


async def stored(engine: PlainEngine, chain: Sequence[BlockHash], fill: int = 7) -> int:
    """Put what has room; the blocks that are there afterwards."""
    await engine.put(chain, fill)
    return await found(engine, chain, fill)


async def found(
    engine: PlainEngine, chain: Sequence[BlockHash], fill: int = 7, plan: PullPlan | None = None
) -> int:
    """Leading blocks that the node promises, each proved and compared byte for byte."""
    answer = await engine.prepare(chain, plan)
    for block, slot in zip(chain, answer["slots"], strict=False):
        right = payload_of(block, fill, engine.layout.payload_bytes)
        assert engine.payload(slot, block) == right
    await engine.ask("release", request="r")
    return int(answer["blocks"])
