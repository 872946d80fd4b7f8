"""A node's folder on disk: taken at the start, opened as a tier when the first engine tells sizes.

Must not know what is kept there, nor when.
"""

import asyncio
import contextlib
import logging
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from prefixfleet.cluster.lock_file import locked
from prefixfleet.cluster.pool_host import Kind
from prefixfleet.cluster.settings import NodeSettings
from prefixfleet.store.chain import BlockHash
from prefixfleet.store.encryption import open_slot_files, read_key
from prefixfleet.store.errors import ConfigError
from prefixfleet.store.eviction import LruOrder
from prefixfleet.store.ssd import SsdTier
from prefixfleet.store.wear import WearBudget
from prefixfleet.store.wear_file import WearFile

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Disk:
    """Where a node's disk tier lies; ``key`` is None when its blocks are not encrypted."""

    folder: Path
    key: bytes | None = field(repr=False)


@contextlib.contextmanager
def held_disk(settings: NodeSettings) -> Iterator[Disk | None]:
    """This node's own folder in ``ssd_path``, held for as long as the context, and the key of its
    blocks; None without a disk tier.

    Raises:
        ConfigError: the folder cannot be made or written, or another daemon holds it, or
            see `disk_key`.
    """
    key = disk_key(settings)
    if settings.ssd_path is None:
        yield None
        return
    folder = settings.ssd_path / settings.name
    with locked(
        folder / "lock",
        unwritable="set PREFIXFLEET_NODE_SSD_PATH to a folder that can be written, or leave it out "
        "for a node without a disk tier",
        taken=f"another daemon uses {folder}; set PREFIXFLEET_NODE_NAME or "
        "PREFIXFLEET_NODE_SSD_PATH so that every daemon has a folder of its own",
    ):
        yield Disk(folder, key)


def disk_key(settings: NodeSettings) -> bytes | None:
    """The key that blocks on disk are encrypted with; None: they lie there as they are.

    Raises:
        ConfigError: it cannot be had, or there is no disk tier to use it.
    """
    if settings.ssd_key_file is None:
        return None
    if settings.ssd_path is None:
        raise ConfigError(
            "PREFIXFLEET_NODE_SSD_KEY_FILE is set and PREFIXFLEET_NODE_SSD_PATH is not: there is "
            "no disk tier to encrypt; set both or none"
        )
    return read_key(settings.ssd_key_file)


def _budget(
    disk: Disk, settings: NodeSettings, slot_bytes: int
) -> tuple[WearFile | None, WearBudget]:
    """What may be written, by what earlier lives left of it; no file where there is no limit."""
    per_day = settings.ssd_write_bytes_per_day
    if not per_day:
        return None, WearBudget(None, time.monotonic)
    file = WearFile(disk.folder / "wear", time.time)
    return file, WearBudget(
        per_day, time.monotonic, least_bytes=slot_bytes, left_bytes=file.left_bytes(per_day)
    )


async def open_tier(
    disk: Disk,
    settings: NodeSettings,
    kind: Kind,
    leaving: Callable[[Sequence[BlockHash]], Awaitable[None]],
) -> SsdTier:
    """The tier for blocks of ``kind``, with what an earlier life left of them.

    Raises:
        ConfigError: the folder's files cannot be read or written, or not one block fits.
    """
    files = open_slot_files(disk.folder, kind.layout, kind.digest, settings.ssd_bytes, disk.key)
    if files.num_slots < 1:
        raise ConfigError(
            f"a block of this engine takes {kind.layout.slot_bytes} bytes, the disk tier has "
            f"{settings.ssd_bytes}; set PREFIXFLEET_NODE_SSD_BYTES higher"
        )
    wear_file, budget = await asyncio.to_thread(_budget, disk, settings, files.layout.slot_bytes)
    tier = SsdTier(
        files,
        kind.digest,
        LruOrder(),
        budget=budget,
        wear_file=wear_file,
        leaving=leaving,
        clock=time.monotonic,
    )
    found = await tier.open()
    how = "encrypted" if disk.key else "not encrypted"
    log.info("disk tier of %d slots, %s, %d blocks of an earlier life", files.num_slots, how, found)
    return tier
