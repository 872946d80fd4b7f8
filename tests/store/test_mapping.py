"""A pool's file is mapped where huge pages fit, for as long as anybody views it."""

import ctypes
import gc
import mmap
import os
from pathlib import Path

import pytest

from prefixfleet.store.mapping import HUGE_BYTES, map_shared

NAME = "pool-of-the-mapping-test"
PAGE = mmap.PAGESIZE


@pytest.fixture
def pool_file():
    fd = os.memfd_create(NAME)
    os.truncate(fd, 3 * HUGE_BYTES)
    yield fd
    os.close(fd)


def reserved_bytes():
    """Of address space that nothing lies in."""
    lines = Path("/proc/self/maps").read_text().splitlines()
    ends = [line.split()[0].split("-") for line in lines if " ---p " in line]
    return sum(int(end, 16) - int(first, 16) for first, end in ends)


def mapped():
    return [line for line in Path("/proc/self/maps").read_text().splitlines() if NAME in line]


@pytest.mark.parametrize("size", [1, PAGE, HUGE_BYTES, HUGE_BYTES + PAGE, 3 * HUGE_BYTES])
def test_a_mapping_begins_where_a_huge_page_may_and_is_of_the_file_alone(pool_file, size):
    reserved = reserved_bytes()
    memory = map_shared(pool_file, size)
    memory[size - 1] = 7

    assert memory.nbytes == size
    assert ctypes.addressof(ctypes.c_char.from_buffer(memory)) % HUGE_BYTES == 0
    assert os.pread(pool_file, 1, size - 1) == b"\x07"
    (line,) = mapped()
    first, _, end = line.split()[0].partition("-")
    assert int(end, 16) - int(first, 16) == -(-size // PAGE) * PAGE
    assert reserved_bytes() == reserved


def test_it_goes_with_the_last_view(pool_file):
    memory = map_shared(pool_file, PAGE)
    part = memory[10:20]
    del memory
    gc.collect()
    part[:] = b"0123456789"
    assert mapped()

    del part
    gc.collect()

    assert not mapped()
    assert os.pread(pool_file, 10, 10) == b"0123456789"


def test_what_cannot_be_mapped_leaves_nothing_behind(tmp_path):
    path = tmp_path / "file"
    path.touch()
    with path.open("rb") as read_only:
        reserved = reserved_bytes()

        with pytest.raises(PermissionError):
            map_shared(read_only.fileno(), PAGE)

    assert reserved_bytes() == reserved
