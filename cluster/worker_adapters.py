"""Which LoRA adapters an engine serves, and the digests that its connector makes of their files.

Must not know how the engine is started, nor the registry.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path

from prefixfleet.cluster.weights import weights_digest
from prefixfleet.store.adapters import MAX_ADAPTERS
from prefixfleet.store.errors import ConfigError, ProtocolError

LOOK_S = 2.0

log = logging.getLogger(__name__)


class WorkerAdapters:
    """Owned by a worker's event loop. ``listed`` gives the engine's adapters and their folders;
    it raises `ProtocolError`.

    ``found`` has a digest for each, as of the last look; empty where the connector stores nothing
    of it either, since nobody can tell its files.
    """

    def __init__(self, listed: Callable[[], Awaitable[Mapping[str, str]]], cache_dir: Path) -> None:
        self._listed = listed
        self._cache_dir = cache_dir
        self._said = ""
        self.found: dict[str, str] = {}

    async def run(self) -> None:
        """Look until cancelled."""
        while True:
            await asyncio.sleep(LOOK_S)
            try:
                await self.look()
            except Exception:  # the top of a task: the engine must not end for it
                log.exception("adapters of an engine: a fault of the worker")

    async def look(self) -> None:
        """Ask once. What cannot be asked stays as it was."""
        try:
            roots = await self._listed()
        except ProtocolError as error:
            return self._say_once(f"{error}; adapters stay as they were")
        if len(roots) > MAX_ADAPTERS:
            self._say_once(f"{len(roots)} adapters, only {MAX_ADAPTERS} are announced")
            roots = {name: roots[name] for name in sorted(roots)[:MAX_ADAPTERS]}
        self.found = await asyncio.to_thread(self._digests, roots)

    def _digests(self, roots: Mapping[str, str]) -> dict[str, str]:
        return {name: self._digest(name, root) for name, root in roots.items()}

    def _digest(self, name: str, root: str) -> str:
        """Made anew when a file has changed: the kept one is found by their times and sizes."""
        if not root or not Path(root).is_dir():
            self._say_once(f"adapter {name!r}: {root!r} is no folder here: routed by load only")
            return ""
        try:
            return weights_digest(Path(root), self._cache_dir)
        except ConfigError as error:
            self._say_once(f"adapter {name!r}: routed by load only: {error}")
            return ""

    def _say_once(self, what: str) -> None:
        if what != self._said:
            self._said = what
            log.warning("%s", what)
