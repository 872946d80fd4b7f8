"""A node's folder on disk: taken at the start, opened as a tier when the first engine tells sizes.

Must not know what is kept there, nor when.
"""

import contextlib
import fcntl
import logging
import os
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from pathlib import Path

from prefixfleet.cluster.pool_host import Kind
from prefixfleet.cluster.settings import NodeSettings
from prefixfleet.store.chain import BlockHash
from prefixfleet.store.errors import ConfigError
from prefixfleet.store.eviction import LruOrder
from prefixfleet.store.slot_files import SlotFiles
from prefixfleet.store.ssd import SsdTier, WearBudget

log = logging.getLogger(__name__)


@contextlib.contextmanager
def disk_folder(settings: NodeSettings) -> Iterator[Path | None]:
    """This node's own folder in ``ssd_path``, held for as long as the context; None without one.

    Raises:
        ConfigError: it cannot be made or written, or another daemon holds it.
    """
    if settings.ssd_path is None:
        yield None
        return
    folder = settings.ssd_path / settings.name
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        fd = os.open(folder / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise ConfigError(
            f"node {settings.name}: {error}; set PREFIXFLEET_NODE_SSD_PATH to a folder that can "
            "be written, or leave it out for a node without a disk tier"
        ) from error
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield folder
    except BlockingIOError as error:
        raise ConfigError(
            f"another daemon uses {folder}; set PREFIXFLEET_NODE_NAME or "
            "PREFIXFLEET_NODE_SSD_PATH so that every daemon has a folder of its own"
        ) from error
    finally:
        os.close(fd)


async def open_tier(
    folder: Path,
    settings: NodeSettings,
    kind: Kind,
    leaving: Callable[[Sequence[BlockHash]], Awaitable[None]],
) -> SsdTier:
    """The tier for blocks of ``kind``, with what an earlier life left of them.

    Raises:
        ConfigError: the folder's files cannot be read or written, or not one block fits.
    """
    slots = settings.ssd_bytes // kind.layout.slot_bytes
    if slots < 1:
        raise ConfigError(
            f"a block of this engine takes {kind.layout.slot_bytes} bytes, the disk tier has "
            f"{settings.ssd_bytes}; set PREFIXFLEET_NODE_SSD_BYTES higher"
        )
    tier = SsdTier(
        SlotFiles(folder, kind.layout, kind.digest, slots),
        kind.digest,
        LruOrder(),
        budget=WearBudget(settings.ssd_write_bytes_per_day or None, time.monotonic),
        leaving=leaving,
        clock=time.monotonic,
    )
    found = await tier.open()
    log.info("disk tier of %d slots, %d blocks of an earlier life", slots, found)
    return tier
