"""What lies in a node's folder on disk: a folder of bucket files for each namespace, by its digest.

Blocking I/O. Must not know whose engine is here.
"""

import contextlib
import logging
import re
from pathlib import Path

from prefixfleet.store.errors import ConfigError
from prefixfleet.store.kept_files import KeptFile, files_in
from prefixfleet.store.slot_files import BUCKET_GLOB

log = logging.getLogger(__name__)

_DIGEST = re.compile("[0-9a-f]{32}")


def folder_of(folder: Path, digest: bytes) -> Path:
    """Where the files of one namespace lie."""
    return folder / digest.hex()


def kept_in(folder: Path, cap_bytes: int) -> dict[bytes, list[KeptFile]]:
    """The files that earlier lives left, by the digest of their namespace; what they take is at
    most ``cap_bytes`` after this: the oldest go. Files right in ``folder`` go too: they are of a
    release whose disk was one namespace's.

    Raises:
        ConfigError: the folder cannot be read or written.
    """
    try:
        _delete_all(list(folder.glob(BUCKET_GLOB)), "files of an earlier release")
        kept = {
            bytes.fromhex(path.name): files_in(path)
            for path in folder.iterdir()
            if _DIGEST.fullmatch(path.name) and path.is_dir()
        }
        _trim(kept, cap_bytes)
    except OSError as error:
        raise ConfigError(f"ssd tier, {folder}: {error}") from error
    for digest in [digest for digest, files in kept.items() if not files]:
        del kept[digest]
        with contextlib.suppress(OSError):  # something else lies in it
            folder_of(folder, digest).rmdir()
    return kept


def left_in(folder: Path) -> list[KeptFile]:
    """The files of a namespace whose tier was closed; none that are known where the disk fails."""
    try:
        return files_in(folder)
    except OSError as error:
        log.warning("ssd tier, %s: %s", folder, error)
        return []


def remove(folder: Path) -> None:
    """Delete a namespace's files, and their folder if nothing else lies in it."""
    try:
        _delete_all([file.path for file in files_in(folder)], "")
        folder.rmdir()
    except OSError as error:
        log.warning("ssd tier, %s: %s", folder, error)


def _trim(kept: dict[bytes, list[KeptFile]], cap_bytes: int) -> None:
    oldest = sorted((file, digest) for digest, files in kept.items() for file in files)
    held, gone = sum(file.size for file, _ in oldest), []
    for file, digest in oldest:
        if held <= cap_bytes:
            break
        held -= file.size
        kept[digest].remove(file)
        gone.append(file.path)
    _delete_all(gone, "files past the cap (PREFIXFLEET_NODE_SSD_BYTES)")


def _delete_all(paths: list[Path], why: str) -> None:
    for path in paths:
        path.unlink(missing_ok=True)
    if paths and why:
        log.warning("ssd tier, %s: %d %s are deleted", paths[0].parent, len(paths), why)
