"""Whom to pull from, for engines that come without a router's plan: the index, asked by threads."""

import asyncio
import contextlib
import itertools
import logging
import threading
from collections.abc import Coroutine, Sequence
from typing import Any, TypeVar

from prefixfleet.store.chain import BlockHash
from prefixfleet.store.errors import IndexUnavailable
from prefixfleet.store.index import PrefixIndex
from prefixfleet.store.records import PullPlan

log = logging.getLogger(__name__)

ASK_S = 3.0
PULL_S = 5.0
T = TypeVar("T")


class Sources:
    """Owned by an adapter, which closes it; has a thread with an event loop for the index.

    Without the index there is no plan, which is said once until it answers again.
    """

    def __init__(self, index: PrefixIndex, node: str) -> None:
        self._index = index
        self._node = node
        self._names = itertools.count(1)
        self._degraded = False
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(
            target=self._loop.run_forever, name="prefixfleet-sources", daemon=True
        )
        self._thread.start()

    def plan(self, chain: Sequence[BlockHash]) -> PullPlan | None:
        """From the node that has most of ``chain``, if it has more than this one."""
        try:
            plan = self._wait(self._plan(chain))
        except (IndexUnavailable, TimeoutError) as error:
            if not self._degraded:
                log.warning("no pulls, the index does not answer: %s", error)
            self._degraded = True
            return None
        self._degraded = False
        return plan

    def close(self) -> None:
        """Give the connections back and end the thread."""
        with contextlib.suppress(TimeoutError):
            self._wait(self._index.close())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(ASK_S)
        if not self._thread.is_alive():
            self._loop.close()

    async def _plan(self, chain: Sequence[BlockHash]) -> PullPlan | None:
        held = await self._index.match(chain)
        here = held.pop(self._node, 0)
        best = max(held, key=lambda node: held[node], default="")
        if not best or held[best] <= here:
            return None
        epochs = {member.node: member.epoch for member, _ in await self._index.members()}
        if best not in epochs:
            return None
        return PullPlan(
            request=f"hicache-{self._node}-{next(self._names)}",
            source=best,
            source_epoch=epochs[best],
            blocks=held[best],
            budget_s=PULL_S,
        )

    def _wait(self, work: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(ASK_S)
