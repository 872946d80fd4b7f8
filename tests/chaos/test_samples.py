"""What a chaos run calls a leak."""

import subprocess

import pytest
from chaos_samples import MORE_BYTES, MORE_DESCRIPTORS, SHARED, descriptors_of, leaks


@pytest.mark.parametrize(
    ("rest", "found"),
    [
        ((1_000, 10), 0),
        ((1_000 + MORE_BYTES, 10 + MORE_DESCRIPTORS), 0),
        ((1_001 + MORE_BYTES, 10), 1),
        ((1_000, 11 + MORE_DESCRIPTORS), 1),
    ],
)
def test_a_process_may_hold_a_little_more_than_before(rest, found):
    assert len(leaks({"r0": (1_000, 10)}, {"r0": rest})) == found


def test_shared_memory_may_hold_nothing_more():
    assert leaks({SHARED: (100, 2)}, {SHARED: (100, 2)}) == []
    assert len(leaks({SHARED: (100, 2)}, {SHARED: (101, 3)})) == 2


def test_files_of_a_disk_tier_do_not_count_as_descriptors(tmp_path):
    """Of a process of its own: threads of this one open files too."""
    pipe = subprocess.PIPE
    with (tmp_path / "bucket-1.slots").open("w") as bucket, (tmp_path / "other").open("w") as other:
        files = [bucket.fileno(), other.fileno()]
        cat = subprocess.Popen(["cat"], stdin=pipe, stdout=pipe, pass_fds=files)

    with cat:
        cat.stdin.write(b"it has started\n")
        cat.stdin.flush()
        cat.stdout.readline()
        assert descriptors_of(cat.pid) == 3 + 1  # its three streams, and `other`
