"""A node's folder on disk, and the key of its blocks: taken at the start.

Must not know what is kept there, nor when.
"""

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from prefixfleet.cluster.lock_file import locked
from prefixfleet.cluster.settings import NodeSettings
from prefixfleet.store.encryption import read_key
from prefixfleet.store.errors import ConfigError


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
