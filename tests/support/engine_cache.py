"""A node's cache as a fake engine uses it: the real channel and pool, as by the connector."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from dataclasses import asdict
from pathlib import Path

from chaos_model import LAYOUT, PAYLOAD_BYTES, kv_of
from upstreams import NAMESPACE

from prefixfleet.cluster.connector_pool import RankPool
from prefixfleet.cluster.engine_channel import join_hashes
from prefixfleet.cluster.engine_client import EngineClient
from prefixfleet.store.errors import CorruptBlock, FleetError
from prefixfleet.store.records import Outcome

PREPARE_S = 4.0
COMPUTE_S_A_BLOCK = 0.002


class Cache:
    """The node's cache as this engine uses it: every failure is a miss."""

    def __init__(self, socket: Path, engine: str) -> None:
        hello = {"engine": engine, "rank": 0, "namespace": asdict(NAMESPACE), "shards": 1}
        hello["payload_bytes"] = PAYLOAD_BYTES
        self.scheduler = EngineClient(socket, {**hello, "role": "scheduler"})
        self.worker = EngineClient(socket, {**hello, "role": "worker"})
        self.pool = RankPool(self.worker, LAYOUT, 0)
        self.scheduler.start()
        self.worker.start()

    async def load(self, request: str, chain: list[bytes], plan: object) -> tuple[list[bytes], int]:
        """KV of the leading blocks that could be had, proved; and how many were pulled."""
        try:
            answer = await asyncio.wrap_future(
                self.scheduler.ask(
                    "prepare",
                    within_s=PREPARE_S + 2,
                    request=request,
                    chain=join_hashes(chain),
                    plan=plan,
                    budget_s=PREPARE_S,
                )
            )
            kv = await asyncio.to_thread(self._copy, chain, answer["slots"])
            return kv, min(len(kv), answer["pulled"])
        except FleetError:
            return [], 0

    @contextlib.asynccontextmanager
    async def prefilled(
        self, request: str, chain: list[bytes], plan: object
    ) -> AsyncIterator[tuple[list[bytes], Outcome]]:
        """The prompt's KV, loaded or computed, as long as the request lasts."""
        try:
            kv, pulled = await self.load(request, chain, plan)
            first = len(kv)
            for block in chain[first:]:
                await asyncio.sleep(COMPUTE_S_A_BLOCK)
                kv.append(kv_of(block))
            if first < len(chain):
                await asyncio.to_thread(self.save, chain, kv, first)
            yield (
                kv,
                Outcome(
                    request=request,
                    prompt_blocks=len(chain),
                    engine_blocks=0,
                    local_blocks=first - pulled,
                    pulled_blocks=pulled,
                    pulled_bytes=0,
                    pull_s=0.0,
                    head=chain[0].hex() if chain else "",
                ),
            )
        finally:
            self.release(request)

    def _copy(self, chain: list[bytes], slots: list[int]) -> list[bytes]:
        kv: list[bytes] = []
        for block, slot in zip(chain, slots, strict=False):
            target = memoryview(bytearray(PAYLOAD_BYTES))
            try:
                self.pool.copy_out(slot, block, target)
            except CorruptBlock:
                self.pool.tell("discard", [block])
                break
            kv.append(bytes(target))
        return kv

    def save(self, chain: list[bytes], kv: list[bytes], first: int) -> None:
        """Write the blocks from ``first`` on that the node wants."""
        with contextlib.suppress(FleetError):
            slots = self.pool.reserve(chain[first - 1] if first else b"", chain[first:])
            written = []
            for block, data, slot in zip(chain[first:], kv[first:], slots, strict=True):
                if slot >= 0:
                    self.pool.payload(slot)[:] = data
                    written.append((block, slot))
            self.pool.commit(written)

    def release(self, request: str) -> None:
        self.scheduler.ask("release", within_s=5.0, request=request)

    def close(self) -> None:
        self.scheduler.close()
        self.worker.close()
