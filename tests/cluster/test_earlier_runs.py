"""A demo killed from outside leaves things: the next one clears them away, and nothing else."""

import os
import subprocess
import sys
import tempfile
import uuid
from pathlib import Path

import pytest
from eventually import until

from prefixfleet.cluster.earlier_runs import clear_demos, clear_run
from prefixfleet.cluster.leftovers import RUN_VARIABLE, RUNTIME_PREFIX
from prefixfleet.cluster.run_state import RunState, StateHome


@pytest.fixture
def home(tmp_path):
    return StateHome(tmp_path)


def dead_pid():
    process = subprocess.Popen(["true"])
    process.wait()
    return process.pid


@pytest.fixture
def make_fleet(home):
    """A fleet's folder with a runtime folder and a process of its run."""
    processes, runtimes = [], []

    def make(name):
        directory = home.fleet(name)
        directory.create()
        runtime = Path(tempfile.mkdtemp(prefix=RUNTIME_PREFIX))
        state = RunState(
            run=uuid.uuid4().hex,
            supervisor=dead_pid(),
            started_ticks=1,
            phase="ready",
            runtime_dir=str(runtime),
        )
        directory.write(state)
        process = subprocess.Popen(
            [sys.executable, "-c", "import time; time.sleep(600)"],
            env=os.environ | {RUN_VARIABLE: state.run},
        )
        processes.append(process)
        runtimes.append(runtime)
        return directory, runtime, process

    yield make
    for process in processes:
        process.kill()
        process.wait()
    for runtime in runtimes:
        if runtime.exists():
            runtime.rmdir()


async def test_a_dead_demo_goes_with_its_processes_and_folders(home, make_fleet):
    directory, runtime, process = make_fleet(f"demo-{dead_pid()}")

    assert clear_demos(home) == [directory.path.name]

    await until(lambda: process.poll() is not None)
    assert not runtime.exists()
    assert not directory.path.exists()


async def test_a_demo_that_runs_and_a_fleet_of_another_name_stay(home, make_fleet):
    made = [make_fleet(f"demo-{os.getpid()}"), make_fleet("default"), make_fleet("demo-of-mine")]

    assert clear_demos(home) == []

    for directory, runtime, process in made:
        assert directory.read()
        assert runtime.exists()
        assert process.poll() is None


async def test_a_demo_whose_lock_is_held_stays(home, make_fleet):
    """Another demo is clearing it away just now."""
    directory, runtime, _ = make_fleet(f"demo-{dead_pid()}")
    directory.lock()

    assert clear_demos(home) == []

    assert runtime.exists()
    directory.unlock()


async def test_a_fleet_that_comes_up_again_clears_away_its_own_earlier_run(make_fleet):
    directory, runtime, process = make_fleet("default")

    assert clear_run(directory)
    assert not clear_run(directory)

    await until(lambda: process.poll() is not None)
    assert not runtime.exists()
    assert directory.read() is None
