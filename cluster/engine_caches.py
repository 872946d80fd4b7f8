"""The gpu tier of a node: what its engines hold themselves, by their own KV events.

Each engine is a member of the fleet's second index (`ENGINE_AREA`), under its own name: a router
reads there which engine needs not even load a prefix. Nobody pulls from an engine, so nothing here
is ever a copy that somebody counts on. Must not know pools or links.
"""

import asyncio
import contextlib
import logging
from collections.abc import Callable, Iterable
from contextlib import aclosing
from functools import partial
from typing import Any

from prefixfleet.cluster.announcer import Announcer
from prefixfleet.cluster.engine_questions import Hello
from prefixfleet.store.chain import BlockHash
from prefixfleet.store.engine_follower import EngineFollower
from prefixfleet.store.engine_mirror import Change, EngineMirror
from prefixfleet.store.errors import IndexUnavailable
from prefixfleet.store.following import numbers_of
from prefixfleet.store.index import PrefixIndex
from prefixfleet.store.namespace import Scope, chain_root, hash_key
from prefixfleet.store.records import NodeRecord

log = logging.getLogger(__name__)

SCHEDULER = "scheduler"
"""The half of an engine that has one connection, whatever the number of its ranks."""


class EngineCache:
    """One engine's own cache as the fleet is told of it. Owned by `EngineCaches`."""

    def __init__(
        self,
        hello: Hello,
        record: Callable[[], NodeRecord],
        index: PrefixIndex,
        secret: bytes,
        clock: Callable[[], float],
    ) -> None:
        self.hello = hello
        namespace, key = hello.identity(), hash_key(secret)
        digest = namespace.digest(secret)
        self._mirror = EngineMirror(
            lambda salt: chain_root(digest, Scope(salt=salt), key), namespace.block_tokens, key
        )
        self._follower = EngineFollower(self._mirror, hello.events, hello.replay)
        self._heads: dict[BlockHash, BlockHash] = {}  # of what was told, until it is taken back
        self._announcer = Announcer(
            index,
            record=record,
            resident=lambda: self._mirror.held,
            segments=self._segments,
            joined=lambda epoch: None,
            clock=clock,
        )

    async def run(self) -> None:
        """Follow and tell until cancelled; then the engine is no member any more."""
        try:
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(self._announcer.run())
                tasks.create_task(self._follow())
        finally:
            with contextlib.suppress(IndexUnavailable):  # then the lease ends by itself
                await self._announcer.leave()

    def numbers(self) -> dict[str, Any]:
        """See `numbers_of`."""
        return numbers_of(self._follower, self._mirror)

    @property
    def fault(self) -> str:
        """See `EngineFollower.fault`."""
        return self._follower.fault

    async def _follow(self) -> None:
        was_faulty = False
        async with aclosing(self._follower.changes()) as changes:
            async for change in changes:
                await self._tell(change)
                if self.fault and not was_faulty:
                    log.warning("%s", self.fault)
                was_faulty = bool(self.fault)

    async def _tell(self, change: Change) -> None:
        if change.removed:
            await self._announcer.withdraw(change.removed)
            for block in change.removed:
                self._heads.pop(block, None)
        self._announcer.publish(change.added)

    def _segments(self, hashes: Iterable[BlockHash]) -> dict[BlockHash, list[BlockHash]]:
        """By segment. A block that left before it was published has no place: it is left out."""
        groups: dict[BlockHash, list[BlockHash]] = {}
        for block in hashes:
            if (head := self._mirror.segment_head(block)) is not None:
                self._heads[block] = head
            if (head := self._heads.get(block)) is not None:
                groups.setdefault(head, []).append(block)
        return groups


class EngineCaches:
    """Those of one node's engines that tell of their caches. Owned by the daemon's event loop.

    ``faults`` say which are not followed although they should be, or not wholly.
    """

    def __init__(
        self, index: PrefixIndex, secret: bytes, host: str, clock: Callable[[], float]
    ) -> None:
        self._index = index
        self._secret = secret
        self._host = host
        self._clock = clock
        self._caches: dict[str, EngineCache] = {}
        self._running: dict[str, asyncio.Task[None]] = {}
        self._ending: set[asyncio.Task[None]] = set()
        self._broken: dict[str, str] = {}  # why an engine that is here is followed no more

    @property
    def faults(self) -> list[str]:
        """See the class."""
        faults = (*self._broken.values(), *(cache.fault for cache in self._caches.values()))
        return [fault for fault in faults if fault]

    def came(self, hello: Hello) -> None:
        """An engine connected: follow it from now on, if it tells anything. What came under its
        name before is followed no more."""
        if hello.role != SCHEDULER or not hello.events:
            return
        self._forget(hello.engine)
        record = NodeRecord(node=hello.engine, host=self._host)
        cache = EngineCache(hello, lambda: record, self._index, self._secret, self._clock)
        self._caches[hello.engine] = cache
        task = self._running[hello.engine] = asyncio.create_task(cache.run())
        task.add_done_callback(partial(self._ended, hello.engine))

    def left(self, hello: Hello) -> None:
        """Its connection ended, ``hello`` is the very one that `came`: what it holds is nobody's
        business any more. An engine that came again meanwhile is followed on."""
        if (cache := self._caches.get(hello.engine)) is not None and cache.hello is hello:
            self._forget(hello.engine)

    def numbers(self) -> dict[str, dict[str, Any]]:
        """By engine; see `EngineCache.numbers`."""
        return {name: cache.numbers() for name, cache in self._caches.items()}

    async def close(self) -> None:
        """Follow nobody any more."""
        running = [*self._running.values(), *self._ending]
        self._caches.clear()
        self._running.clear()
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)

    def _forget(self, engine: str) -> None:
        self._broken.pop(engine, None)
        if self._caches.pop(engine, None) is not None:
            task = self._running.pop(engine)
            task.cancel()
            self._ending.add(task)
            task.add_done_callback(self._ending.discard)

    def _ended(self, engine: str, task: asyncio.Task[None]) -> None:
        """The top of a task: its fault must be seen, and is no reason to stop the node."""
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("an engine's own cache is followed no more", exc_info=error)
            if self._running.get(engine) is task:
                why = f"{engine}: its own cache is followed no more: {error!r:.200}"
                self._broken[engine] = why
