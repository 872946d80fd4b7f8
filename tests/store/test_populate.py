"""A pool's pages are in the page table before they are used, and no byte of it changes."""

import ctypes
import errno
import mmap
import os
import random
import resource
import threading
from pathlib import Path

import pytest
from eventually import until

from prefixfleet.store import populate
from prefixfleet.store.mapping import map_shared
from prefixfleet.store.populate import SLICE_BYTES, Populating

PAGE = mmap.PAGESIZE
SIZE = 2 * SLICE_BYTES + 3 * PAGE


@pytest.fixture
def shared_file():
    fd = os.memfd_create("pool")
    os.posix_fallocate(fd, 0, SIZE)
    yield fd
    os.close(fd)


def page_faults_of_reading(memory):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    bytes(memory[::PAGE])
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before


async def test_pages_are_there_before_they_are_used(shared_file):
    os.pwrite(shared_file, b"\x07" * 100, SLICE_BYTES - 50)
    memory = memoryview(mmap.mmap(shared_file, SIZE))

    populating = Populating(memory, huge=False)

    await until(lambda: populating.done_bytes == SIZE)
    assert page_faults_of_reading(memory) < SIZE // PAGE // 4
    assert bytes(memory[SLICE_BYTES - 50 : SLICE_BYTES + 50]) == b"\x07" * 100
    assert sum(memory) == 7 * 100


def huge_kib(address):
    """Of the mapping that begins at ``address``."""
    text = Path("/proc/self/smaps").read_text().partition(f"{address:x}-")[2]
    return int(text.partition("ShmemPmdMapped:")[2].split()[0])


async def test_pages_become_huge_ones_and_no_byte_changes(shared_file):
    memory = map_shared(shared_file, SIZE)
    address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    memory[:] = (expected := random.Random(5).randbytes(SIZE))
    if populate._collapse(address, SLICE_BYTES) == errno.EINVAL:
        pytest.skip("this kernel makes no huge pages of shared memory")

    populating = Populating(memory, huge=True)

    await until(lambda: populating.done_bytes == SIZE)
    assert huge_kib(address) == 2 * SLICE_BYTES // 1024
    assert populating.huge_bytes == 2 * SLICE_BYTES
    assert memory == expected

    other = map_shared(shared_file, SIZE)  # as an engine does, which makes none
    populating = Populating(other, huge=False)
    await until(lambda: populating.done_bytes == SIZE)
    assert huge_kib(ctypes.addressof(ctypes.c_char.from_buffer(other))) == 2 * SLICE_BYTES // 1024
    assert populating.huge_bytes == 0


@pytest.mark.parametrize("error", [errno.EINVAL, errno.ENOMEM, errno.EBUSY])
async def test_a_kernel_that_makes_no_huge_pages_is_soon_asked_no_more_and_it_is_said_once(
    shared_file, monkeypatch, caplog, error
):
    answers = [error, 0]  # one refusal says nothing
    calls = []
    monkeypatch.setattr(populate, "REFUSALS", 2)
    monkeypatch.setattr(
        populate,
        "_collapse",
        lambda *given: calls.append(given) or (answers.pop(0) if answers else error),
    )
    os.posix_fallocate(shared_file, 0, 6 * SLICE_BYTES)

    with caplog.at_level("INFO"):
        populating = Populating(memoryview(mmap.mmap(shared_file, 6 * SLICE_BYTES)), huge=True)
        await until(lambda: populating.done_bytes == 6 * SLICE_BYTES)

    assert len(calls) == 4
    assert populating.huge_bytes == SLICE_BYTES
    assert caplog.text.count(os.strerror(error)) == 1


async def test_memory_that_the_kernel_refuses_is_left_as_it_is(shared_file, caplog):
    read_only = memoryview(mmap.mmap(shared_file, SIZE, prot=mmap.PROT_READ))

    with caplog.at_level("INFO"):
        populating = Populating(read_only, huge=False)
        await until(lambda: "at first use" in caplog.text)

    assert populating.done_bytes == 0


async def test_it_ends_after_the_slice_at_which_it_is_stopped(shared_file, monkeypatch):
    memory = memoryview(mmap.mmap(shared_file, SIZE))
    advise, go_on = populate._populate, threading.Event()
    monkeypatch.setattr(populate, "_populate", lambda *given: go_on.wait(60) and advise(*given))
    populating = Populating(memory, huge=False)

    populating.stop()
    go_on.set()

    await until(lambda: not populating.running)
    assert populating.done_bytes <= SLICE_BYTES


def test_a_process_that_may_have_no_more_threads_uses_the_pool_without(
    shared_file, monkeypatch, caplog
):
    def refuse(self):
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refuse)
    memory = memoryview(mmap.mmap(shared_file, SIZE))

    with caplog.at_level("INFO"):
        populating = Populating(memory, huge=False)

    assert "at first use: can't start new thread" in caplog.text
    assert not populating.running
    populating.stop()
