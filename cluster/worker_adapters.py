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
    """Owned by a worker's event loop. ``listed`` gives the engine's adapters and their folders,
    ``greet`` asks one for a token; both raise `ProtocolError`.

    ``found`` has a digest for each, as of the last look; empty where the connector stores nothing
    of it either, since nobody can tell its files.
    """

    def __init__(
        self,
        listed: Callable[[], Awaitable[Mapping[str, str]]],
        greet: Callable[[str], Awaitable[None]],
        cache_dir: Path,
    ) -> None:
        self._listed = listed
        self._greet = greet
        self._cache_dir = cache_dir
        self._first: dict[tuple[str, str], str] = {}  # digests when they were seen first
        self._greeted: set[tuple[str, str]] = set()
        self._said: set[str] = set()  # at the last look
        self._says: set[str] = set()
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
        self._said, self._says = self._says, set()
        try:
            roots = await self._listed()
        except ProtocolError as error:
            return self._say_once(f"{error}; adapters stay as they were")
        if len(roots) > MAX_ADAPTERS:
            self._say_once(f"{len(roots)} adapters, only {MAX_ADAPTERS} are announced")
            roots = {name: roots[name] for name in sorted(roots)[:MAX_ADAPTERS]}
        found = await asyncio.to_thread(self._digests, roots)
        self._first = {one: self._first.get(one, found[one[0]]) for one in roots.items()}
        self._greeted &= self._first.keys()
        self.found = {one[0]: self._steady(one, found[one[0]]) for one in self._first}
        await asyncio.gather(*map(self._meet, self._first.keys() - self._greeted))

    async def _meet(self, one: tuple[str, str]) -> None:
        try:
            await self._greet(one[0])
        except ProtocolError as error:
            return self._say_once(f"{error}; asked again")
        self._greeted.add(one)

    def _steady(self, one: tuple[str, str], digest: str) -> str:
        """Empty if the files were others before: nobody can tell which of them the engine has."""
        if digest == self._first[one]:
            return digest
        self._say_once(
            f"adapter {one[0]!r}: the files in {one[1]!r} have changed: routed by load only; load "
            "changed files from a new folder"
        )
        return ""

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
        if what not in self._said | self._says:
            log.warning("%s", what)
        self._says.add(what)
