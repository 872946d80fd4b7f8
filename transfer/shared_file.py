"""Files in shared memory: which one a segment lies in, and mapping one that a peer told of.

A file is told and taken only if it is private to this user, and taken only if it is the very one
that was meant: same device, same inode, as large as it must be.
"""

import hashlib
import mmap
import os
import stat
from pathlib import Path
from typing import Annotated

import msgspec

from prefixfleet.store.errors import ConfigError, PeerLost

BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
SHARED_MEMORY = "/dev/shm"


class SharedFile(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Where a segment lies: ``length`` bytes at ``offset`` of a file."""

    path: Annotated[str, msgspec.Meta(min_length=1, max_length=4096)]
    device: Annotated[int, msgspec.Meta(ge=0)]
    inode: Annotated[int, msgspec.Meta(ge=0)]
    offset: Annotated[int, msgspec.Meta(ge=0)]
    length: Annotated[int, msgspec.Meta(ge=1)]


def place() -> str:
    """Digest of this boot of this host and its shared memory, as this process sees it.

    Containers of one host that do not share ``/dev/shm`` have different places. Raises
    `ConfigError` where the host tells neither.
    """
    try:
        boot, device = BOOT_ID.read_bytes(), os.stat(SHARED_MEMORY).st_dev
    except OSError as error:
        raise ConfigError(f"shared-memory link: {error}; mount /proc and /dev/shm") from error
    return hashlib.blake2b(b"%s/%d" % (boot.strip(), device), digest_size=16).hexdigest()


def file_of(address: int, length: int) -> SharedFile:
    """The file that is mapped at this address of this process.

    Raises:
        ConfigError: it is no file, not all of it, or others may read it.
    """
    for line in Path("/proc/self/maps").read_text().splitlines():
        span, _, offset, _, inode, *name = line.split(None, 5)
        start, end = (int(part, 16) for part in span.split("-"))
        if start <= address < end:
            break
    else:
        raise ConfigError("shared-memory link: the segment is not mapped")
    path = name[0] if name else ""
    try:
        found = os.stat(path)
    except OSError as error:
        raise ConfigError(f"shared-memory link: the segment is no file: {error}") from error
    _check_private(found, path)
    if found.st_ino != int(inode) or end < address + length:
        raise ConfigError(f"shared-memory link: the segment is not one mapping of {path}")
    at = int(offset, 16) + address - start
    return SharedFile(path, found.st_dev, found.st_ino, at, length)


def map_file(file: SharedFile) -> memoryview:
    """The segment's bytes, to read. Raises `PeerLost` if it is not the file that was told."""
    try:
        fd = os.open(file.path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    except (OSError, ValueError) as error:  # what can be no path is a ValueError
        raise PeerLost(f"shared memory of the peer: {error}") from error
    try:
        found = os.fstat(fd)
        _check_private(found, file.path)
        if (found.st_dev, found.st_ino) != (file.device, file.inode):
            raise PeerLost(f"shared memory of the peer: {file.path} is another file by now")
        if found.st_size < file.offset + file.length:
            raise PeerLost(f"shared memory of the peer: {file.path} has {found.st_size} bytes")
        whole = mmap.mmap(fd, file.offset + file.length, prot=mmap.PROT_READ)
    except (OSError, ConfigError) as error:
        raise PeerLost(f"shared memory of the peer: {error}") from error
    finally:
        os.close(fd)
    return memoryview(whole)[file.offset :]


def _check_private(found: os.stat_result, path: str) -> None:
    if not stat.S_ISREG(found.st_mode):
        raise ConfigError(f"{path}: not a regular file")
    if found.st_mode & 0o077 or found.st_uid != os.geteuid():
        raise ConfigError(
            f"{path}: mode {stat.S_IMODE(found.st_mode):o} of user {found.st_uid}, expected 600 "
            f"of user {os.geteuid()}: a pool is nobody else's to read"
        )
