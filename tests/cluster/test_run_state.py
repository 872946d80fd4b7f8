"""What `up` writes down: private, complete, and never mistaken for another process's."""

import dataclasses
import json
import os
import stat
import subprocess
import sys

import pytest

from prefixfleet.cluster.run_state import RunDir, RunState, StateHome, start_ticks
from prefixfleet.store.errors import ConfigError


@pytest.fixture
def run_dir(tmp_path):
    folder = RunDir(tmp_path / "default")
    folder.create()
    return folder


def state_of(pid, **changes):
    state = RunState(
        run="r", supervisor=pid, started_ticks=start_ticks(pid), phase="ready", endpoint="http://e"
    )
    return dataclasses.replace(state, **changes)


def test_what_was_written_is_read_back_and_then_forgotten(run_dir):
    state = state_of(os.getpid(), redis_url="redis://:secret@h")

    run_dir.write(state)

    assert run_dir.read() == state
    run_dir.forget()
    assert run_dir.read() is None


def test_nobody_else_can_read_the_secret_or_the_state(run_dir):
    run_dir.write(state_of(os.getpid()))

    modes = {p.name: stat.S_IMODE(p.stat().st_mode) for p in run_dir.path.iterdir()}

    assert modes == {"logs": 0o700, "secret": 0o600, "fleet.json": 0o600}
    assert stat.S_IMODE(run_dir.path.stat().st_mode) == 0o700


def test_the_secret_is_kept_from_run_to_run(run_dir):
    first = run_dir.secret_file.read_text()

    run_dir.create()

    assert run_dir.secret_file.read_text() == first
    assert len(first) == 64


def test_a_second_supervisor_is_refused_and_told_where_the_first_one_is(run_dir):
    run_dir.lock()
    run_dir.write(state_of(os.getpid()))
    second = RunDir(run_dir.path)

    with pytest.raises(ConfigError, match=rf"already up at http://e \(process {os.getpid()}\)"):
        second.lock()

    run_dir.unlock()
    second.lock()
    second.unlock()


def test_the_lock_of_a_killed_supervisor_is_free(run_dir):
    code = (
        "import os, sys; from pathlib import Path;"
        "from prefixfleet.cluster.run_state import RunDir;"
        "RunDir(Path(sys.argv[1])).lock(); os.kill(os.getpid(), 9)"
    )
    subprocess.run([sys.executable, "-c", code, str(run_dir.path)], check=False)

    run_dir.lock()

    run_dir.unlock()


def test_another_process_with_the_same_number_is_not_the_supervisor():
    mine = state_of(os.getpid())

    assert mine.supervisor_alive()
    assert not dataclasses.replace(mine, started_ticks=mine.started_ticks + 1).supervisor_alive()


def test_a_process_that_ended_is_not_alive():
    with subprocess.Popen([sys.executable, "-c", ""]) as process:
        state = state_of(process.pid)
        process.wait()

        assert not state.supervisor_alive()


@pytest.mark.parametrize("content", ["", "[]", "{", json.dumps({"run": "r"}), '{"new_field": 1}'])
def test_a_state_file_that_is_not_ours_is_an_error_with_its_path(run_dir, content):
    (run_dir.path / "fleet.json").write_text(content)

    with pytest.raises(ConfigError, match=r"fleet\.json.*remove it if no fleet runs"):
        run_dir.read()


def test_a_home_that_cannot_be_written_says_what_to_set(tmp_path):
    (tmp_path / "file").write_text("")

    with pytest.raises(ConfigError, match="set XDG_STATE_HOME"):
        RunDir(tmp_path / "file" / "fleet").create()


def test_the_folder_follows_the_users_own_setting(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    assert StateHome.of_user().fleet("f").path == tmp_path / "prefixfleet" / "f"

    monkeypatch.delenv("XDG_STATE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert StateHome.of_user().path == tmp_path / ".local" / "state" / "prefixfleet"
