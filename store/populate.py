"""Pages of a pool get their places in this process's page table before anybody waits for them.

A page that is touched for the first time costs many times what copying its bytes costs, and every
process that maps a pool pays once a page. The kernel does it faster when it is asked for many, and
makes one huge page of each 512 when it is asked for that: bytes then move with less of its time.
"""

import ctypes
import logging
import os
import threading

import numpy as np

from prefixfleet.store.mapping import HUGE_BYTES

log = logging.getLogger(__name__)

SLICE_BYTES = HUGE_BYTES
"""About a millisecond's work: whoever maps or unmaps memory of this process waits for a slice."""
REFUSALS = 16
"""Huge pages in a row that the kernel did not make until it is asked for no more: each time it has
looked through its memory for a free one."""
_MADV_POPULATE_WRITE = 23  # of Linux 5.14
_MADV_COLLAPSE = 25  # of Linux 6.1, for shared memory as for any other

_libc = ctypes.CDLL(None, use_errno=True)


class Populating:
    """A thread that goes once through ``memory``, a mapping that may be written, and ends. Owned by
    who mapped it, who stops it when the mapping is not needed any more. It changes no byte.

    A kernel that cannot do it (before Linux 5.14), or a process that may have no more threads, is
    logged; pages then get their places at first use.

    ``huge`` ones are made of what begins at a multiple of `HUGE_BYTES`, where the kernel has any
    (from Linux 6.1 on); ``huge_bytes`` says of how much. Only one process should ask for them: it
    pays for them in its own control group, whoever had paid for the small ones.
    """

    def __init__(self, memory: memoryview, *, huge: bool) -> None:
        self.done_bytes = 0
        self.huge_bytes = 0
        self._refusals = 0 if huge else REFUSALS  # in a row
        self._memory = np.frombuffer(memory, np.uint8)
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="prefixfleet-pages", daemon=True)
        try:
            self._thread.start()
        except RuntimeError as error:  # nobody must go without a pool for it
            _give_up(error)

    @property
    def running(self) -> bool:
        """Whether it has not ended yet."""
        return self._thread.is_alive()

    def stop(self) -> None:
        """It ends after the slice it is at; the mapping stays until then."""
        self._stop.set()

    def _run(self) -> None:
        address, size = self._memory.ctypes.data, self._memory.nbytes
        while self.done_bytes < size and not self._stop.is_set():
            length = min(SLICE_BYTES, size - self.done_bytes)
            if self._refusals < REFUSALS and length == SLICE_BYTES:
                self._make_huge(address + self.done_bytes)
            if error := _populate(address + self.done_bytes, length):
                _give_up(os.strerror(error))
                return
            self.done_bytes += length

    def _make_huge(self, address: int) -> None:
        """Before its pages have their places: it takes several times as long to take those away."""
        error = _collapse(address, SLICE_BYTES)
        if not error:
            self._refusals = 0
            self.huge_bytes += SLICE_BYTES
            return
        self._refusals += 1
        if self._refusals == REFUSALS:
            done = f"{self.huge_bytes} of {self._memory.nbytes} bytes"
            log.info("huge pages of a pool: %s, then no more: %s", done, os.strerror(error))


def _give_up(why: object) -> None:
    log.info("pages of a pool get their places at first use: %s", why)


def _populate(address: int, length: int) -> int:
    """0, or the kernel's error number. The interpreter's lock is free meanwhile."""
    return _advise(address, length, _MADV_POPULATE_WRITE)


def _collapse(address: int, length: int) -> int:
    """As `_populate`. ``EINVAL``: this kernel makes none of such memory; ``ENOMEM``, ``EBUSY``:
    none is free, or this control group may have no more."""
    return _advise(address, length, _MADV_COLLAPSE)


def _advise(address: int, length: int, advice: int) -> int:
    place, size = ctypes.c_void_p(address), ctypes.c_size_t(length)
    return ctypes.get_errno() if _libc.madvise(place, size, advice) else 0
