"""A router on a port of its own, in front of engines on theirs."""

import asyncio
import secrets
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AsyncExitStack, ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
from aiohttp import web
from aiohttp.typedefs import Handler
from eventually import until
from redis_servers import new_fleet
from upstreams import NAMESPACE, SECRET, Asked, FakeEngine, answer

from prefixfleet.router.__main__ import BACKLOG, app_runner
from prefixfleet.router.core import Router
from prefixfleet.router.fleet import Fleet
from prefixfleet.router.prompt import Prompt, prefix_chain
from prefixfleet.router.rendered import Rendered
from prefixfleet.router.settings import RouterSettings
from prefixfleet.store.chain import segment_heads
from prefixfleet.store.index import Membership
from prefixfleet.store.load_board import LoadBoard
from prefixfleet.store.namespace import hash_key
from prefixfleet.store.poll_rights import PollRights
from prefixfleet.store.records import NodeRecord, WorkerRecord
from prefixfleet.store.redis_index import RedisIndex
from prefixfleet.store.registry import WorkerRegistry
from prefixfleet.store.stored_responses import StoredResponses
from prefixfleet.store.worker_orders import WorkerOrders

LEASE_S = 600.0  # no test outlives it: what ends a lease in a test is the test
READY_S = 120.0  # a real engine may warm up while it is examined


@dataclass
class Rig:
    """Engines, a router in front of them, and a client. Everything on loopback."""

    folder: Path
    stack: AsyncExitStack
    redis_url: str
    fleet: str = field(default_factory=new_fleet)
    members: dict[str, Membership] = field(default_factory=dict)
    index: RedisIndex = field(init=False)
    registry: WorkerRegistry = field(init=False)
    router: Router = field(init=False)
    runner: web.AppRunner = field(init=False)
    client: aiohttp.ClientSession = field(init=False)

    async def engine(self, name: str = "a", **options: Any) -> FakeEngine:
        engine = FakeEngine(name, self.folder, **options)
        await self.stack.enter_async_context(engine.running())
        return engine

    async def start(
        self,
        *engines: FakeEngine,
        records: list[WorkerRecord] | None = None,
        ready: int | None = None,
        **settings: Any,
    ) -> Router:
        """Start a router and wait until ``ready`` workers (all by default) may be used."""
        self.index = RedisIndex(self.redis_url, self.fleet, lease_s=LEASE_S, timeout_s=20)
        self.registry = WorkerRegistry(self.redis_url, self.fleet, timeout_s=20)
        self.stack.push_async_callback(self.index.close)
        self.stack.push_async_callback(self.registry.close)
        records = [e.record() for e in engines] if records is None else records
        await self.announce(*records)
        orders = WorkerOrders(self.redis_url, self.fleet, SECRET, timeout_s=20)
        self.stack.push_async_callback(orders.close)
        loads = LoadBoard(
            self.redis_url, self.fleet, secrets.token_hex(8), time.monotonic, timeout_s=20
        )
        self.stack.push_async_callback(loads.close)
        polls = PollRights(self.redis_url, self.fleet, secrets.token_hex(8), timeout_s=20)
        self.stack.push_async_callback(polls.close)
        responses = StoredResponses(self.redis_url, self.fleet, timeout_s=20)
        self.stack.push_async_callback(responses.close)
        fleet = Fleet(self.index, self.registry, SECRET, orders, loads, None, polls, responses)
        settings = {"slow_start_s": 0, "worker_wait_s": 0, "health_interval_s": 0} | settings
        router = Router(fleet, RouterSettings(port=0, **settings))
        self.router = await self.stack.enter_async_context(router)
        self.runner = runner = app_runner(self.router)
        await runner.setup()
        self.stack.push_async_callback(runner.cleanup)
        await web.TCPSite(runner, "127.0.0.1", 0, backlog=BACKLOG).start()
        base = f"http://127.0.0.1:{runner.addresses[0][1]}"
        self.client = await self.stack.enter_async_context(aiohttp.ClientSession(base))
        await until(lambda: len(self.router.roster.standings()) >= len(records))
        await self.until_ready(len(records) if ready is None else ready)
        await asyncio.wait_for(self.router.feed.loaded.wait(), 30)
        return self.router

    async def node_face(self, path: str, answer: Handler) -> str:
        """URL of a node's HTTP face that answers POSTs to ``path``."""
        app = web.Application()
        app.router.add_post(path, answer)
        runner = web.AppRunner(app)
        await runner.setup()
        self.stack.push_async_callback(runner.cleanup)
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        return f"http://127.0.0.1:{runner.addresses[0][1]}"

    async def announce(self, *records: WorkerRecord, ttl_s: float = LEASE_S) -> None:
        for record in records:
            await self.registry.announce(record, ttl_s=ttl_s)

    async def lists(self, *records: WorkerRecord) -> None:
        """These are all the workers that are announced, and the router has read so. What a test
        only puts into the roster is gone when that next looks at the registry."""
        expected = {record.worker: record for record in records}
        await self.announce(*records)
        for worker in await self.registry.workers():
            if worker.worker not in expected:
                await self.registry.withdraw(worker.worker)

        def read() -> bool:
            return {s.record.worker: s.record for s in self.router.roster.standings()} == expected

        await until(read)

    @contextmanager
    def asked_first(self, engine: FakeEngine, other: FakeEngine) -> Iterator[None]:
        """``engine`` gets the next request: ``other`` is busy for far longer than the request may
        be under way, and has nothing to do as soon as ``engine`` has it."""
        behave = engine.behave or answer
        busy = ExitStack()

        async def first(engine: FakeEngine, request: web.Request, asked: Asked) -> Any:
            busy.close()
            return await behave(engine, request, asked)

        with busy:
            charged = self.router.book.charged(
                other.name, tokens=50_000, sequences=1, expected_s=50
            )
            busy.enter_context(charged)
            engine.behave = first
            yield
        engine.behave = behave

    async def until_ready(self, count: int) -> None:
        def ready() -> bool:
            return sum(s.state == "ready" for s in self.router.roster.standings()) == count

        await until(ready, READY_S)

    async def holds(
        self,
        engine: FakeEngine,
        token_ids: Sequence[int],
        http: str = "",
        links: dict[str, Any] | None = None,
        salt: str = "",
        lora: str = "",
    ) -> None:
        """``engine``'s node joins the index and publishes the prefix of ``token_ids``."""
        node = engine.record().node
        record = NodeRecord(node=node, host="h", http=http, stats={"links": links or {}})
        member = await self.index.join(record)
        self.members[node] = member
        chain = chain_of(token_ids, salt, lora)
        if chain:
            segments: dict[bytes, list[bytes]] = {}
            for head, block in zip(segment_heads(chain), chain, strict=True):
                segments.setdefault(head, []).append(block)
            await self.index.publish(member, segments)
        await until(lambda: self.router.view.leading(chain).get(node, 0) == len(chain))
        await until(lambda: node in self.router.feed.records)

    def chain(self, worker: str, text: str, model: str, salt: str = "") -> list[bytes]:
        """The chain of ``text`` as the router computes it for a worker that serves ``model``."""
        serving = self.router.roster.serving(worker, model)
        assert serving is not None
        ids = serving.tokens.of_text(text)
        prompt = Prompt(rendered=Rendered(ids), tokens=len(ids), salt=salt)
        namespace, lora = serving.namespace, serving.lora or ""
        return prefix_chain(prompt, namespace, serving.block_tokens, hash_key(SECRET), lora)

    async def post(
        self, path: str = "/v1/completions", **body: Any
    ) -> tuple[int, Mapping[str, str], Any]:
        """Status, headers and JSON of one answer."""
        prompt = {"prompt": "hello"} if path == "/v1/completions" else {}
        body = {"model": "tiny"} | prompt | body
        async with self.client.post(path, json=body) as response:
            return response.status, response.headers, await response.json()


def chain_of(token_ids: Sequence[int], salt: str = "", lora: str = "") -> list[bytes]:
    """The chain that an engine of the fake fleet computes."""
    prompt = Prompt(rendered=Rendered(token_ids), tokens=len(token_ids), salt=salt)
    namespace, key = NAMESPACE.digest(SECRET), hash_key(SECRET)
    return prefix_chain(prompt, namespace, NAMESPACE.block_tokens, key, lora)
