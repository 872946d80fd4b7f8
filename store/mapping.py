"""Mapping a pool's file where huge pages fit: the processor finds 2 MiB by one entry of its table
instead of 512, and the kernel copies to and from it in longer runs."""

import ctypes
import mmap
import os
import weakref

HUGE_BYTES = 2 * 1024 * 1024
"""Of a huge page, on x86-64 and on Arm with pages of 4 KiB."""
_MAP_FIXED = 0x10
_FAILED = ctypes.c_void_p(-1).value

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [
    ctypes.c_void_p,
    ctypes.c_size_t,
    ctypes.c_int,
    ctypes.c_int,
    ctypes.c_int,
    ctypes.c_long,
]
_libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]


def map_shared(fd: int, size_bytes: int) -> memoryview:
    """The file's first ``size_bytes``, to read and write, at a multiple of `HUGE_BYTES`; mapped for
    as long as anybody views them. Raises `OSError`."""
    anonymous = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    room = _map(None, size_bytes + HUGE_BYTES, 0, anonymous, -1)
    start = -(-room // HUGE_BYTES) * HUGE_BYTES
    before, after = start - room, room + HUGE_BYTES - start
    try:
        access, shared = mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_SHARED | _MAP_FIXED
        _map(start, size_bytes, access, shared, fd)
    except OSError:
        _libc.munmap(room, size_bytes + HUGE_BYTES)
        raise
    end = -(-(start + size_bytes) // mmap.PAGESIZE) * mmap.PAGESIZE
    if before:
        _libc.munmap(room, before)
    if after:
        _libc.munmap(end, after)
    memory = (ctypes.c_char * size_bytes).from_address(start)
    weakref.finalize(memory, _libc.munmap, start, size_bytes).atexit = False
    return memoryview(memory).cast("B")


def _map(address: int | None, length: int, access: int, flags: int, fd: int) -> int:
    place: int = _libc.mmap(address, length, access, flags, fd, 0)
    if place == _FAILED:
        error = ctypes.get_errno()
        raise OSError(error, os.strerror(error))
    return place
