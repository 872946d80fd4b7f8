"""One router put together: everything it owns, opened and closed in order."""

import asyncio
import itertools
import secrets
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Self

import aiohttp

from prefixfleet.router.activity import Activity
from prefixfleet.router.book import Book
from prefixfleet.router.degraded import Degraded
from prefixfleet.router.dispatch import Dispatcher
from prefixfleet.router.feed import Feed
from prefixfleet.router.hints import Hints
from prefixfleet.router.keys import Key, Keys, tenant_salt
from prefixfleet.router.limits import Limits
from prefixfleet.router.metrics import Metrics
from prefixfleet.router.parity import check_parity
from prefixfleet.router.pool import Pool
from prefixfleet.router.roster import Registry, Roster
from prefixfleet.router.settings import RouterSettings
from prefixfleet.router.tokens import Tokens, load_tokens
from prefixfleet.router.turns import Turns
from prefixfleet.router.view import View
from prefixfleet.router.worker import Worker
from prefixfleet.store.errors import ConfigError
from prefixfleet.store.index import PrefixIndex
from prefixfleet.store.namespace import hash_key
from prefixfleet.store.records import WorkerRecord

HIT_RATIOS_KEPT = 2_000
RELOAD_S = 1.0


@dataclass(frozen=True, slots=True)
class Fleet:
    """What a router reads of its fleet, from the outside."""

    index: PrefixIndex
    registry: Registry
    secret: bytes


class Router:
    """Owned by one event loop; open it with ``async with``."""

    def __init__(
        self,
        fleet: Fleet,
        settings: RouterSettings,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.settings = settings
        self.clock = clock
        self.metrics = Metrics()
        self.activity = Activity(clock, time.time)
        self.degraded = Degraded(clock)
        self.view = View(clock)
        self.book = Book(clock)
        self.keys = Keys(settings.keys_file)
        self.limits = Limits(clock)
        self.feed = Feed(fleet.index, self.view, self.degraded)
        self.roster = Roster(fleet.registry, self._examine, self.degraded)
        self._key = hash_key(fleet.secret)
        self.dispatcher = Dispatcher(
            self.view, self.book, lambda: self.feed.records, self._key, clock
        )
        self.turns = Turns(self.dispatcher, self.book, settings.ttft_slo_s, clock)
        self.hit_ratios: deque[float] = deque(maxlen=HIT_RATIOS_KEPT)
        self.started_s = clock()
        self.in_flight = 0
        self.threads = ThreadPoolExecutor(2, thread_name_prefix="tokenise")
        self._secret = fleet.secret
        self._ids = (f"{secrets.token_hex(8)}{number:012x}" for number in itertools.count())
        self._tokens: dict[Path, Tokens] = {}
        self.pool = Pool(
            connect_timeout_s=settings.connect_timeout_s,
            silence_timeout_s=settings.silence_timeout_s,
        )
        self._open = AsyncExitStack()
        self.session: aiohttp.ClientSession
        self.hints: Hints

    async def __aenter__(self) -> Self:
        self.keys.load()
        async with AsyncExitStack() as stack:
            stack.callback(self.threads.shutdown, wait=False, cancel_futures=True)
            self.session = await stack.enter_async_context(aiohttp.ClientSession())
            stack.callback(self.pool.close)
            self.hints = Hints(self.session, self._secret, self.view, self.metrics)
            stack.push_async_callback(self.hints.close)
            for loop in (self.feed.run(), self.roster.run(), self._reload()):
                stack.push_async_callback(_cancelled, asyncio.create_task(loop))
            self._open = stack.pop_all()
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self._open.aclose()

    def new_id(self) -> str:
        """A request's id, unique in the fleet: 64 random bits of this router and a number."""
        return next(self._ids)

    def salt_of(self, key: Key, asked: str) -> str:
        """Salt of a request's chains; see `tenant_salt`."""
        return tenant_salt(key, asked, self._secret)

    async def _reload(self) -> None:
        """Read again what may change while the router runs."""
        while True:
            await asyncio.sleep(RELOAD_S)
            try:
                self.keys.reload_if_changed()
            except ConfigError as error:
                self.degraded.enter("keys", str(error), "correct the file; the old keys hold")
            else:
                self.degraded.end("keys")

    async def _examine(self, record: WorkerRecord) -> Worker:
        namespace = record.identity()
        folder = self.settings.tokenizer_path or Path(record.model_path)
        tokens = self._tokens.get(folder)
        if tokens is None:
            tokens = await asyncio.to_thread(load_tokens, folder)
            self._tokens[folder] = tokens
        worker = Worker(record, tokens, namespace.digest(self._secret), namespace.block_tokens)
        await check_parity(worker, self._key, self.session)
        return worker


async def _cancelled(task: asyncio.Task[None]) -> None:
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
