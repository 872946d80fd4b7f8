"""Node daemons in a thread of their own, for engines under test that block theirs.

All daemons of one `Daemons` share an index in memory, so they are peers and can pull.
"""

import asyncio
import threading
from collections.abc import Callable, Coroutine
from contextlib import AsyncExitStack
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TypeVar

from eventually import until
from node_rig import pool_of, running_node, settings_of

from prefixfleet.cluster.node import NodeDaemon
from prefixfleet.store.memory_index import MemoryIndex

T = TypeVar("T")
CALL_S = 30.0


class Daemons:
    """Owns the thread, its loop and every daemon in it."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._nodes: dict[str, tuple[NodeDaemon, AsyncExitStack]] = {}

    def __enter__(self) -> Self:
        self._thread.start()
        self._index = self.call(self._make_index())
        self.engine_index = self.call(self._make_index())
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for name in list(self._nodes):
            self.stop(name)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(CALL_S)
        self._loop.close()

    def start(self, name: str = "a", pool_bytes: int = 8 << 20, **changes: Any) -> Path:
        """A daemon; the path of its socket."""
        settings = settings_of(self._folder, name, pool_bytes=pool_bytes, **changes)
        self._nodes[name] = self.call(self._enter(settings))
        return settings.socket_path

    def stop(self, name: str = "a") -> None:
        """End a daemon and everything it held."""
        _, stack = self._nodes.pop(name)
        self.call(stack.aclose())

    def call(self, work: Coroutine[Any, Any, T]) -> T:
        """Result of a coroutine run among the daemons."""
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(CALL_S)

    def ask(self, name: str, question: Callable[[NodeDaemon], T]) -> T:
        """Result of ``question``, asked in the daemons' thread."""

        async def answer() -> T:
            return question(self._nodes[name][0])

        return self.call(answer())

    def wait_unused(self, name: str = "a") -> None:
        """Until the engines' last messages were read and nothing of the pool is held any more."""

        async def wait() -> None:
            pool = pool_of(self._nodes[name][0]).host.pool
            await until(lambda: pool.counts().pinned == pool.counts().reserved == 0)
            pool.check()

        self.call(wait())

    async def _make_index(self) -> MemoryIndex:
        return MemoryIndex(lease_s=60)

    async def _enter(self, settings: Any) -> tuple[NodeDaemon, AsyncExitStack]:
        stack = AsyncExitStack()
        running = running_node(self._index, settings, engine_index=self.engine_index)
        node = await stack.enter_async_context(running)
        return node, stack
