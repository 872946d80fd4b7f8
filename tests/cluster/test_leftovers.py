"""`down` ends the processes of one run and removes its files, and touches nothing else."""

import os
import subprocess
import sys
import uuid

import pytest
from eventually import until

from prefixfleet.cluster.leftovers import (
    RUN_VARIABLE,
    SHARED_MEMORY,
    end_processes,
    pool_prefix,
    processes_of,
    remove_files,
)
from prefixfleet.store.errors import ConfigError

SLEEPER = "import time; print('up', flush=True); time.sleep(600)"
DEAF = "import signal; signal.signal(15, signal.SIG_IGN);" + SLEEPER


@pytest.fixture
def run():
    return uuid.uuid4().hex


@pytest.fixture
def start(run):
    started = []

    def start(code, run=run):
        process = subprocess.Popen(
            [sys.executable, "-c", code],
            env=os.environ | {RUN_VARIABLE: run},
            stdout=subprocess.PIPE,
        )
        assert process.stdout is not None
        started.append(process)
        process.stdout.readline()
        return process

    yield start
    for process in started:
        process.kill()
        process.communicate()


async def test_every_process_of_the_run_ends_and_others_stay(run, start):
    mine, deaf, other = start(SLEEPER), start(DEAF), start(SLEEPER, run="another")
    assert sorted(processes_of(run)) == sorted([mine.pid, deaf.pid])

    left = end_processes(run, grace_s=0.2)

    assert left == []
    await until(lambda: mine.poll() is not None and deaf.poll() is not None)
    assert other.poll() is None


def test_no_process_of_the_run_is_fine(run):
    assert end_processes(run, grace_s=0.0) == []


def test_a_run_whose_name_begins_the_same_is_another_one(run, start):
    start(SLEEPER, run=run + "0")

    assert processes_of(run) == []


def test_the_runtime_folder_and_its_pools_go_and_others_stay(tmp_path):
    mine, other = tmp_path / "pf-mine", tmp_path / "pf-other"
    for folder in (mine, other):
        folder.mkdir()
        (folder / "a.sock").touch()
    pools = [SHARED_MEMORY / f"{pool_prefix(f)}a" for f in (mine, other)]
    for pool in pools:
        pool.touch()

    try:
        left = remove_files(mine)

        assert left == []
        assert [p.exists() for p in (mine, other, *pools)] == [False, True, False, True]
    finally:
        pools[1].unlink()


def test_a_folder_that_is_not_ours_is_never_removed(tmp_path):
    (tmp_path / "precious").mkdir()

    with pytest.raises(ConfigError, match="not a runtime folder of ours"):
        remove_files(tmp_path / "precious")

    assert (tmp_path / "precious").exists()
