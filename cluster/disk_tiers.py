"""`DiskTiers`: the disk tiers of a node's namespaces, opened as their engines come.

One folder, one cap, one wear budget and the same threads for all of them. Must not know what is
kept, nor when.
"""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from prefixfleet.cluster.disk import Disk
from prefixfleet.cluster.disk_folders import folder_of, kept_in, left_in, remove
from prefixfleet.cluster.node_stats import NAME_DIGITS
from prefixfleet.cluster.pool_host import Kind
from prefixfleet.cluster.settings import NodeSettings
from prefixfleet.store.block_files import BlockFiles
from prefixfleet.store.chain import BlockHash
from prefixfleet.store.disk_space import DiskSpace
from prefixfleet.store.disk_threads import DiskThreads
from prefixfleet.store.encryption import open_slot_files
from prefixfleet.store.errors import ConfigError
from prefixfleet.store.eviction import LruOrder
from prefixfleet.store.kept_files import KeptFile, KeptFiles
from prefixfleet.store.ssd import SharedDisk, SsdTier
from prefixfleet.store.wear import WearBudget
from prefixfleet.store.wear_file import WearFile

log = logging.getLogger(__name__)

OPEN_S = 120.0
"""A disk that has not opened a tier after so long does not answer: recovery takes 0.5 s per
100,000 blocks."""
END_S = 15.0
"""Who ends a namespace waits so long for its files to be closed."""

Leaving = Callable[[Sequence[BlockHash]], Awaitable[None]]


class DiskTiers:
    """Owned by a node's `PoolOpener`. ``faults`` says why a namespace has no tier, by its
    digest."""

    def __init__(self, disk: Disk, settings: NodeSettings) -> None:
        self.faults: dict[bytes, str] = {}
        self._disk = disk
        self._settings = settings
        self._beginning: asyncio.Task[SharedDisk] | None = None
        self._shared: SharedDisk | None = None
        self._tiers: dict[bytes, SsdTier] = {}
        self._endings: set[asyncio.Task[None]] = set()

    async def open(self, kind: Kind, leaving: Leaving) -> SsdTier | None:
        """The tier for blocks of ``kind``, with what an earlier life left of them. None where the
        disk fails, or does not answer within `OPEN_S`: that shows in ``faults``. See `SsdTier` for
        ``leaving``."""
        try:
            async with asyncio.timeout(OPEN_S):
                tier = await self._open(kind, leaving)
        except (ConfigError, TimeoutError) as error:
            why = str(error) or f"{self._disk.folder} did not answer within {OPEN_S:g} s"
            fault = f"no disk tier for namespace {_name(kind.digest)}: {why}"
            log.error("%s", fault)
            self.faults[kind.digest] = fault
            return None
        self.faults.pop(kind.digest, None)
        return tier

    async def end(self, digest: bytes, *, keep: bool) -> None:
        """Close a namespace's tier, if it has one: its blocks leave the index. Its files stay, or,
        where nobody will ask for them, are not to ``keep``. A disk that does not answer is not
        waited for longer than `END_S`: until it does the files count as they did."""
        self.faults.pop(digest, None)
        if self._shared is None or (tier := self._tiers.pop(digest, None)) is None:
            return
        await tier.retire()
        ending = asyncio.create_task(self._put_away(self._shared, digest, tier, keep=keep))
        self._endings.add(ending)
        ending.add_done_callback(self._endings.discard)
        if (await asyncio.wait({ending}, timeout=END_S))[0]:
            ending.result()
        else:
            what = "ssd tier: files of namespace %s are as they were until the disk answers"
            log.error(what, _name(digest))

    async def close(self) -> None:
        """Close all files; a disk that does not answer is not waited for long."""
        for ending in self._endings:
            ending.cancel()
        await asyncio.gather(*(tier.close() for tier in self._tiers.values()))
        if self._shared is not None:
            self._shared.threads.close()

    def numbers(self) -> dict[str, Any]:
        """The disk for status: its cap, what all files take, how many a namespace gave to another,
        and what namespaces have that have no tier: no engine came yet, or for long."""
        if self._shared is None:
            return {}
        space = self._shared.space
        unopened = space.holders.keys() - self._tiers.keys()
        return {
            "cap_bytes": space.cap_bytes,
            "held_bytes": space.held_bytes,
            "given_files": space.given_files,
            "unopened": {_name(digest): space.holders[digest].held_bytes for digest in unopened},
        }

    async def _open(self, kind: Kind, leaving: Leaving) -> SsdTier:
        slot_bytes = kind.layout.slot_bytes
        self._shared = await self._share(slot_bytes)
        self._shared.budget.hold_at_least(slot_bytes)
        async with self._shared.space.turn:
            tier = SsdTier(
                await self._files(kind, self._shared.threads),
                kind.digest,
                LruOrder(),
                disk=self._shared,
                leaving=leaving,
                clock=time.monotonic,
            )
            found = await tier.open()
        self._tiers[kind.digest] = tier
        how = "encrypted" if self._disk.key else "not encrypted"
        what = "disk tier of namespace %s, %s, %d blocks of an earlier life"
        log.info(what, _name(kind.digest), how, found)
        return tier

    async def _share(self, slot_bytes: int) -> SharedDisk:
        """Begun by one thread, however often the wait for it is given up."""
        begun = self._beginning
        if begun is None or (begun.done() and begun.exception()):
            begun = asyncio.create_task(asyncio.to_thread(self._begin, slot_bytes))
            self._beginning = begun
        return await asyncio.shield(begun)

    async def _put_away(
        self, shared: SharedDisk, digest: bytes, tier: SsdTier, *, keep: bool
    ) -> None:
        folder = folder_of(self._disk.folder, digest)
        async with shared.space.turn:
            await tier.close()
            files = await shared.threads.in_order(left_in if keep else remove, folder)
            del shared.space.holders[digest]
            if files:
                shared.space.holders[digest] = self._kept(shared.threads, files)

    async def _files(self, kind: Kind, threads: DiskThreads) -> BlockFiles:
        folder, room = folder_of(self._disk.folder, kind.digest), self._settings.ssd_bytes
        left = await threads.in_order(left_in, folder)
        files = open_slot_files(folder, kind.layout, kind.digest, room, self._disk.key, left)
        if files.num_slots < 1:
            raise ConfigError(
                f"a block of this engine takes a file of {files.bucket_bytes} bytes, the disk tier "
                f"has {room}; set PREFIXFLEET_NODE_SSD_BYTES higher"
            )
        return files

    def _begin(self, slot_bytes: int) -> SharedDisk:
        """Blocking: the budget and the files that earlier lives left."""
        kept = kept_in(self._disk.folder, self._settings.ssd_bytes)
        wear_file, budget = self._budget(slot_bytes)
        threads = DiskThreads(wear_file)
        space = DiskSpace(self._settings.ssd_bytes, time.monotonic)
        space.holders |= {digest: self._kept(threads, files) for digest, files in kept.items()}
        takes_all = self._settings.ssd_admission == "all"
        return SharedDisk(threads, budget, space, takes_all)

    def _budget(self, slot_bytes: int) -> tuple[WearFile | None, WearBudget]:
        """What may be written, by what earlier lives left of it; no file without a limit."""
        per_day = self._settings.ssd_write_bytes_per_day
        if not per_day:
            return None, WearBudget(None, time.monotonic)
        file = WearFile(self._disk.folder / "wear", time.time)
        left = file.left_bytes(per_day)
        return file, WearBudget(per_day, time.monotonic, least_bytes=slot_bytes, left_bytes=left)

    @staticmethod
    def _kept(threads: DiskThreads, files: list[KeptFile]) -> KeptFiles:
        return KeptFiles(files, threads, time.monotonic)


def _name(digest: bytes) -> str:
    return digest.hex()[:NAME_DIGITS]
