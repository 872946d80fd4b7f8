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

Leaving = Callable[[Sequence[BlockHash]], Awaitable[None]]


class DiskTiers:
    """Owned by a node's `PoolOpener`. ``faults`` says why a namespace has no tier, by its
    digest."""

    def __init__(self, disk: Disk, settings: NodeSettings) -> None:
        self.faults: dict[bytes, str] = {}
        self._disk = disk
        self._settings = settings
        self._shared: SharedDisk | None = None
        self._tiers: dict[bytes, SsdTier] = {}

    async def open(self, kind: Kind, leaving: Leaving) -> SsdTier | None:
        """The tier for blocks of ``kind``, with what an earlier life left of them. None where the
        disk fails: that shows in ``faults``. See `SsdTier` for ``leaving``."""
        try:
            tier = await self._open(kind, leaving)
        except ConfigError as error:
            fault = f"no disk tier for namespace {_name(kind.digest)}: {error}"
            log.error("%s", fault)
            self.faults[kind.digest] = fault
            return None
        self.faults.pop(kind.digest, None)
        return tier

    async def end(self, digest: bytes, *, keep: bool) -> None:
        """Close a namespace's tier, if it has one: its blocks leave the index. Its files stay, or,
        where nobody will ask for them, are not to ``keep``."""
        self.faults.pop(digest, None)
        if self._shared is None or digest not in self._tiers:
            return
        space, folder = self._shared.space, folder_of(self._disk.folder, digest)
        async with space.turn:
            tier = self._tiers.pop(digest)
            await tier.retire()
            await tier.close()
            del space.holders[digest]
            if not keep:
                await self._shared.threads.in_order(remove, folder)
            elif files := await self._shared.threads.in_order(left_in, folder):
                space.holders[digest] = self._kept(self._shared.threads, files)

    async def close(self) -> None:
        """Close all files; a disk that does not answer is not waited for long."""
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
        files = self._files(kind)
        slot_bytes = files.layout.slot_bytes
        if self._shared is None:
            self._shared = await asyncio.to_thread(self._begin, slot_bytes)
        self._shared.budget.hold_at_least(slot_bytes)
        async with self._shared.space.turn:
            tier = SsdTier(
                files,
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

    def _files(self, kind: Kind) -> BlockFiles:
        folder, room = folder_of(self._disk.folder, kind.digest), self._settings.ssd_bytes
        files = open_slot_files(folder, kind.layout, kind.digest, room, self._disk.key)
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
        return SharedDisk(threads, budget, space)

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
