"""One process at a time, and errors of whoever holds the lock are its own."""

import pytest

from prefixfleet.cluster.lock_file import locked
from prefixfleet.store.errors import ConfigError


def lock(path):
    return locked(path, unwritable="set ANOTHER_FOLDER", taken="somebody has it")


def test_a_lock_is_held_once_and_free_again_afterwards(tmp_path):
    path = tmp_path / "made" / "lock"
    with lock(path), pytest.raises(ConfigError, match="somebody has it"), lock(path):
        pass
    with lock(path):
        assert path.exists()
    assert path.parent.stat().st_mode & 0o777 == 0o700


def test_a_folder_that_cannot_be_made_says_what_to_set(tmp_path):
    (tmp_path / "file").write_text("")

    with pytest.raises(ConfigError, match=r"file.*set ANOTHER_FOLDER"), lock(tmp_path / "file/x"):
        pass


def test_what_blocks_inside_is_not_taken_for_the_lock(tmp_path):
    with pytest.raises(BlockingIOError, match="another one"), lock(tmp_path / "lock"):
        raise BlockingIOError("another one")
