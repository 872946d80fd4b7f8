"""Node daemons for tests, and a plain engine that talks to one over its socket."""

import asyncio
import secrets
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

from prefixfleet.cluster.engine_channel import (
    CHANNEL_VERSION,
    encode_frame,
    join_hashes,
    read_frame,
)
from prefixfleet.cluster.links import open_links
from prefixfleet.cluster.node import NodeDaemon
from prefixfleet.cluster.open_pool import OpenPool
from prefixfleet.cluster.settings import NodeSettings
from prefixfleet.store.chain import BlockHash
from prefixfleet.store.index import PrefixIndex
from prefixfleet.store.namespace import Namespace
from prefixfleet.store.records import PullPlan
from prefixfleet.store.slot import SlotLayout, seal, verify

SECRET = b"the secret of the test's fleet"
PAYLOAD_BYTES = 8000  # a slot of two pages
NAMESPACE = Namespace(
    model="m",
    weights="w",
    dtype="float32",
    block_tokens=32,
    layout="l",
    engine="vllm",
    isa="any",
    tensor_parallel=1,
)


def settings_of(folder: Path, name: str = "a", **changes: Any) -> NodeSettings:
    values: dict[str, Any] = {"pool_bytes": 1 << 20, "link": "tcp"} | changes
    return NodeSettings(name=name, runtime_dir=folder, **values)


@asynccontextmanager
async def running_node(
    index: PrefixIndex,
    settings: NodeSettings,
    secret: bytes = SECRET,
    engine_index: PrefixIndex | None = None,
) -> AsyncIterator[NodeDaemon]:
    """A daemon, with a watch on its loops: a fault of one of them fails the test."""
    links = open_links(settings, secret)
    async with NodeDaemon(settings, secret, index, links, engine_index) as daemon:
        stop = asyncio.Event()
        watch = asyncio.create_task(daemon.wait(stop))
        try:
            yield daemon
        finally:
            stop.set()
            await watch


def pool_of(daemon: NodeDaemon) -> OpenPool:
    """The pool of a daemon that has one."""
    (pool,) = daemon._opener.pools.values()
    return pool


class PlainEngine:
    """One connection to a daemon; what a rank of an engine would do, without a model."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader = reader
        self.writer = writer
        self.welcome: dict[str, Any] = {}
        self.layout = SlotLayout(payload_bytes=PAYLOAD_BYTES)
        self._waiting: dict[int, asyncio.Future[dict[str, Any]]] = {}
        self._reading: asyncio.Task[None] | None = None
        self._next = 0

    @classmethod
    @asynccontextmanager
    async def connected(cls, socket: Path, **hello: Any) -> AsyncIterator["PlainEngine"]:
        engine = cls(*await asyncio.open_unix_connection(socket))
        engine._reading = asyncio.create_task(engine._read())
        try:
            engine.welcome = await engine.hello(**hello)
            yield engine
        finally:
            await engine.close()

    async def hello(self, **changes: Any) -> dict[str, Any]:
        fields: dict[str, Any] = {
            "version": CHANNEL_VERSION,
            "engine": "test",
            "role": "scheduler",
            "rank": 0,
            "namespace": asdict(NAMESPACE),
            "payload_bytes": PAYLOAD_BYTES,
            "shards": 1,
        }
        self.layout = SlotLayout(payload_bytes=(fields | changes)["payload_bytes"])
        return await self.ask("hello", **fields | changes)

    async def ask(self, op: str, **fields: Any) -> dict[str, Any]:
        """The answer's fields. Raises `ConnectionError` when the daemon closes first."""
        self._next += 1
        answer: asyncio.Future[dict[str, Any]] = asyncio.get_running_loop().create_future()
        self._waiting[self._next] = answer
        self.writer.write(encode_frame({"id": self._next, "op": op, **fields}))
        async with asyncio.timeout(60):
            return await answer

    async def put(self, chain: Sequence[BlockHash], fill: int = 7) -> list[int]:
        """Compute, so to say, the blocks of a chain, and commit them."""
        answer = await self.ask("reserve", parent=b"", hashes=join_hashes(list(chain)), rank=0)
        done = []
        for block, slot in zip(chain, answer["slots"], strict=True):
            if slot >= 0:
                self._write(slot, block, fill)
                done.append(block)
        await self.ask("commit", hashes=join_hashes(done), rank=0)
        return list(answer["slots"])

    async def prepare(
        self, chain: Sequence[BlockHash], plan: PullPlan | None = None, request: str = "r"
    ) -> dict[str, Any]:
        return await self.ask(
            "prepare",
            request=request,
            chain=join_hashes(list(chain)),
            plan=asdict(plan) if plan else None,
            budget_s=plan.budget_s if plan else 20.0,
        )

    def payload(self, slot: int, block: BlockHash) -> bytes:
        """The bytes of a slot, proved to be the block's."""
        memory = self._slot(slot)
        verify(memory, self.layout, self.welcome["namespace_digest"], block)
        return bytes(self.layout.payload(memory))

    def spoil(self, slot: int) -> None:
        """Damage one byte of the slot's payload."""
        start = slot * self.layout.slot_bytes + 100
        with Path(self.welcome["pool_path"]).open("r+b") as pool:
            pool.seek(start)
            byte = pool.read(1)[0]
            pool.seek(start)
            pool.write(bytes([byte ^ 1]))

    def _slot(self, slot: int) -> memoryview:
        with Path(self.welcome["pool_path"]).open("rb") as pool:
            pool.seek(slot * self.layout.slot_bytes)
            return memoryview(bytearray(pool.read(self.layout.slot_bytes)))

    def _write(self, slot: int, block: BlockHash, fill: int) -> None:
        memory = memoryview(bytearray(self.layout.slot_bytes))
        self.layout.payload(memory)[:] = payload_of(block, fill, self.layout.payload_bytes)
        seal(memory, self.layout, self.welcome["namespace_digest"], block)
        with Path(self.welcome["pool_path"]).open("r+b") as pool:
            pool.seek(slot * self.layout.slot_bytes)
            pool.write(memory)

    async def _read(self) -> None:
        try:
            while True:
                answer = await read_frame(self.reader)
                waiting = self._waiting.pop(answer.pop("id"), None)
                if waiting is not None and not waiting.done():
                    waiting.set_result(answer)
        except (asyncio.IncompleteReadError, ConnectionError) as error:
            for waiting in self._waiting.values():
                if not waiting.done():
                    waiting.set_exception(ConnectionError(str(error)))

    async def close(self) -> None:
        assert self._reading is not None
        self._reading.cancel()
        await asyncio.gather(self._reading, return_exceptions=True)
        self.writer.close()
        with suppress(ConnectionError):
            await self.writer.wait_closed()


def payload_of(block: BlockHash, fill: int = 7, size: int = PAYLOAD_BYTES) -> bytes:
    """What the plain engine computes for a block."""
    return (block + bytes([fill])) * (size // 17) + bytes(size % 17)


def fresh_chain(blocks: int) -> list[BlockHash]:
    """Hashes of a prompt that nobody has seen."""
    return [secrets.token_bytes(16) for _ in range(blocks)]
