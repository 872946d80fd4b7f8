"""One router put together: everything it owns, opened and closed in order."""

import asyncio
import itertools
import random
import secrets
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack
from types import TracebackType
from typing import Self

import aiohttp

from prefixfleet.router.activity import Activity
from prefixfleet.router.adapters import listed
from prefixfleet.router.afterwards import Afterwards
from prefixfleet.router.background import Background, asking
from prefixfleet.router.book import Book
from prefixfleet.router.charge import Charge
from prefixfleet.router.degraded import Degraded
from prefixfleet.router.departed import Departed
from prefixfleet.router.dispatch import Dispatcher
from prefixfleet.router.eligible import Eligible
from prefixfleet.router.engine_feed import EngineFeed
from prefixfleet.router.examination import Examination
from prefixfleet.router.feed import Feed
from prefixfleet.router.fleet import Fleet
from prefixfleet.router.hints import Hints
from prefixfleet.router.keepers import Keepers
from prefixfleet.router.kept_running import kept_running
from prefixfleet.router.keys import Key, tenant_salt
from prefixfleet.router.limits import Limits
from prefixfleet.router.loops import loops_of
from prefixfleet.router.metrics import Metrics
from prefixfleet.router.operator_files import OperatorFiles
from prefixfleet.router.orders import Orders
from prefixfleet.router.policy_choice import OURS, POLICIES
from prefixfleet.router.pool import Pool
from prefixfleet.router.roster import Roster
from prefixfleet.router.settings import RouterSettings
from prefixfleet.router.static_workers import StaticWorker
from prefixfleet.router.token_times import TokenTimes
from prefixfleet.router.tracing import Tracing
from prefixfleet.router.traffic import Traffic
from prefixfleet.router.turns import Slos, Turns
from prefixfleet.router.view import View
from prefixfleet.router.wishes import Wishes
from prefixfleet.router.worker_list import WorkerList
from prefixfleet.store.namespace import hash_key

HIT_RATIOS_KEPT = 2_000


class Router:
    """Owned by one event loop; open it with ``async with``."""

    def __init__(
        self,
        fleet: Fleet,
        settings: RouterSettings,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.fleet = fleet
        self.settings = settings
        self.clock = clock
        self.metrics = Metrics()
        self.afterwards = Afterwards()
        self.activity = Activity(clock, time.time)
        self.degraded = Degraded(clock)
        self.view = View(clock)
        self.book = Book(clock)
        self.engine_caches = View(clock)
        self.files = OperatorFiles(settings, self.degraded)
        self.limits = Limits(clock)
        self.feed = Feed(fleet.index, self.view, self.degraded)
        self.cache_feed = (
            Feed(fleet.engines, self.engine_caches, self.degraded, "index of engines' caches")
            if fleet.engines
            else None
        )
        claim = fleet.polls.claim if fleet.polls else None
        self.engines = EngineFeed(fleet.secret, self.degraded, clock, claim, self.files.tls.workers)
        self.orders = Orders(fleet.orders, clock)
        self.token_times = TokenTimes()
        self.traffic = Traffic(settings.slow_start_s, clock, random.random)
        self.examination = Examination(
            fleet.secret, settings.tokenizer_path, self.entries, lambda: self.session
        )
        self.roster = self._new_roster()
        self.keepers = Keepers(fleet.responses, fleet.secret, self.degraded, clock)
        self.dispatcher = self._new_dispatcher()
        self.eligible = Eligible(
            self.dispatcher,
            self.book,
            clock,
            self.token_times,
            self.roster.is_ready,
            self.metrics.decision_s.observe,
        )
        self.turns = Turns(
            self.dispatcher,
            self.eligible,
            self.book,
            Slos(settings.ttft_slo_s, settings.tbt_slo_s),
            clock,
            at_once=settings.policy != OURS,
        )
        learned = (self.dispatcher.speeds, self.token_times, self.traffic, self.roster.openings)
        self._departed = Departed(clock, [part.forget for part in learned])
        self.background = Background(
            asking(lambda: self.session),
            self._ended,
            self.metrics.stored_responses.labels("follow", "untold").inc,
            self.degraded,
            clock,
        )
        self.hit_ratios: deque[float] = deque(maxlen=HIT_RATIOS_KEPT)
        self.started_s = clock()
        self.in_flight = 0
        self.without_worker = 0  # requests that wait because no worker of their model is ready
        self.threads = ThreadPoolExecutor(2, thread_name_prefix="tokenise")
        own = secrets.token_hex(8)
        self._ids = (f"{own}{number:012x}" for number in itertools.count())
        self.tracing = Tracing(settings.otlp_endpoint)
        self.pool = Pool(
            connect_timeout_s=settings.connect_timeout_s,
            silence_timeout_s=settings.silence_timeout_s,
            tls=self.files.tls.workers,
        )
        self._open = AsyncExitStack()
        self.session: aiohttp.ClientSession
        self.hints: Hints
        self.wishes: Wishes

    def _new_roster(self) -> Roster:
        workers = WorkerList(
            self.fleet.registry,
            lambda: [entry.record() for entry in self.entries().values()],
            self.orders,
            self.degraded,
            self.clock,
            self.settings.worker_wait_s,
        )
        return Roster(
            lambda record: self.examination.examine(record),
            lambda worker: listed(worker, self.session),
            workers,
            self.orders,
            self.degraded,
            self.traffic.joined,
        )

    def _new_dispatcher(self) -> Dispatcher:
        return Dispatcher(
            self.view,
            self.book,
            lambda: self.feed.records,
            hash_key(self.fleet.secret),
            self.clock,
            engines=self.engines.view,
            pullable=self.p2p_addresses,
            caches=self.engine_caches,
            step_s=self._step_s,
            policy=POLICIES[self.settings.policy](),
        )

    async def __aenter__(self) -> Self:
        self.files.load()
        async with AsyncExitStack() as stack:
            stack.callback(self.afterwards.close)
            stack.push_async_callback(asyncio.to_thread, self.tracing.close)
            stack.push_async_callback(self.engines.close)
            stack.callback(self.threads.shutdown, wait=False, cancel_futures=True)
            # no limit here: each who asks bounds what it asks of one worker or node, or one that
            # hangs would keep the others' questions waiting
            connector = aiohttp.TCPConnector(limit=0, ssl=self.files.tls.workers)
            self.session = await stack.enter_async_context(
                aiohttp.ClientSession(connector=connector)
            )
            stack.callback(self.pool.close)
            self.hints = Hints(self.session, self.fleet.secret, self.view, self.metrics)
            stack.push_async_callback(self.hints.close)
            self.wishes = Wishes(
                self.session, self.fleet.secret, lambda: self.feed.records, self.metrics
            )
            stack.push_async_callback(self.wishes.close)
            for name, run in loops_of(self).items():
                task = asyncio.create_task(kept_running(name, run, self.degraded))
                stack.push_async_callback(_cancelled, task)
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
        return tenant_salt(key, asked, self.fleet.secret)

    def reload(self) -> None:
        """Follow what may change while the router runs: files, plain engines, who has left."""
        self.files.reload()
        self.engines.follow(self.entries())
        self._departed.look(self.roster.names())

    def entries(self) -> dict[str, StaticWorker]:
        """Plain engines: from the file, and added by order."""
        return {**self.orders.added(), **self.files.static.by_name}

    def p2p_addresses(self) -> dict[str, str]:
        """Addresses of plain engines that pull from each other, by their nodes."""
        return {entry.node: entry.p2p for entry in self.entries().values() if entry.p2p}

    def _step_s(self, worker: str, sequences: int) -> float:
        return self.token_times.seconds(worker, sequences) if sequences else 0.0

    def _ended(self, charge: Charge) -> None:
        self.book.release(charge)
        self.turns.look()


async def _cancelled(task: asyncio.Task[None]) -> None:
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
