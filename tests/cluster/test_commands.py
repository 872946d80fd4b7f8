"""The command line: what it says to wrong input, and what it does when nothing runs."""

import json
import os
import socket
import subprocess
import sys

import pytest

from prefixfleet.cluster import commands, up
from prefixfleet.cluster.__main__ import PASSED_ON, main, parser
from prefixfleet.cluster.run_state import RunState, StateHome, start_ticks
from prefixfleet.store.errors import ConfigError


@pytest.fixture(autouse=True)
def home(tmp_path, monkeypatch):
    """A state folder of the test's own."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    return StateHome.of_user().fleet("default")


@pytest.fixture
def model(tmp_path):
    """A folder that looks like a model; no engine gets to see it here."""
    folder = tmp_path / "model"
    folder.mkdir()
    for name in ("config.json", "tokenizer.json"):
        (folder / name).write_text("{}")
    return folder


def run(*arguments):
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    return ended.value.code


def words(capsys):
    said = capsys.readouterr()
    return " ".join((said.out + said.err).split())


@pytest.mark.parametrize(
    "arguments",
    [
        [],
        ["fly"],
        ["up", "--nodes", "0"],
        ["up", "--nodes", "65"],
        ["up", "--nodes", "two"],
        ["up", "--port", "-1"],
        ["up", "--port", "65536"],
        ["up", "--encoding", "int4"],
        ["status", "--xml"],
    ],
)
def test_wrong_arguments_are_refused_with_a_usage(arguments, capsys):
    assert run(*arguments) == 2
    assert "usage: prefixfleet" in words(capsys)


def test_status_without_a_fleet_says_how_to_start_one(capsys):
    assert run("status") == 2
    assert "prefixfleet up" in words(capsys)


def test_down_without_a_fleet_has_nothing_to_do(capsys):
    assert run("down") == 0
    assert "no fleet" in words(capsys)


def test_an_unknown_setting_stops_the_start(monkeypatch, capsys):
    monkeypatch.setenv("PREFIXFLEET_FLEAT", "x")

    assert run("status") == 2
    assert "PREFIXFLEET_FLEAT" in words(capsys)


def test_a_model_folder_without_a_model_is_refused_by_name(tmp_path, capsys):
    for verb in (("up", "--port", "0"), ("up", "--port", "0", "--detach"), ("demo",)):
        assert run(*verb, "--model", str(tmp_path / "absent")) == 2
        said = words(capsys).replace(" ", "")
        assert str(tmp_path / "absent") in said
        assert "noconfig.json,tokenizer.jsonthere" in said


def test_models_that_do_not_fit_the_nodes_are_refused_and_it_says_what_to_do(model, capsys):
    several = ("--model", str(model)) * 2
    assert run("up", "--port", "0", "--nodes", "1", *several) == 2
    assert "--colocate" in words(capsys)
    for models in ((), several[:2], several[:2] * 9):
        assert run("up", "--port", "0", "--colocate", *models) == 2
        assert "expected 2 to 8" in words(capsys)


def test_a_fleet_without_its_packages_is_told_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "prefixfleet.cluster.fleet", None)  # as if Ray were not here

    with pytest.raises(ConfigError, match=r"not installed.*prefixfleet\[embedded,fleet,ucx\]"):
        up._ray_fleet()


def test_a_port_in_use_is_told_before_anything_starts(model, capsys, home):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        code = run("up", "--model", str(model), "--port", port)

    assert code == 2
    assert port in words(capsys)
    assert home.read().phase == "failed"


def test_a_redis_that_does_not_answer_is_told(model, capsys):
    code = run("up", "--model", str(model), "--port", "0", "--redis", "redis://127.0.0.1:1/0")

    assert code == 2
    assert "Redis" in words(capsys)


def test_the_demo_is_told_too_and_says_where_the_logs_are(model, capsys, monkeypatch):
    monkeypatch.setenv("PREFIXFLEET_REDIS_URL", "redis://127.0.0.1:1/0")

    assert run("demo", "--model", str(model)) == 2

    said = words(capsys)
    assert "Redis" in said
    assert "logs:" in said


def test_a_home_that_cannot_be_written_says_what_to_set(monkeypatch, capsys):
    monkeypatch.setenv("XDG_STATE_HOME", "/proc/nowhere")

    assert run("up") == 2
    assert "XDG_STATE_HOME" in words(capsys)


def test_down_cleans_up_after_a_supervisor_that_died(home, tmp_path, capsys):
    """Its processes are known by the run's name, not by their numbers."""
    runtime = tmp_path / "pf-run"
    runtime.mkdir()
    home.create()
    left = subprocess.Popen(
        ["sleep", "60"], env=os.environ | {"PREFIXFLEETRUN": "run-of-this-test"}
    )
    dead = subprocess.Popen(["true"])
    dead.wait()
    home.write(
        RunState(
            run="run-of-this-test",
            supervisor=dead.pid,
            started_ticks=1,
            phase="ready",
            endpoint="http://127.0.0.1:1",
            runtime_dir=str(runtime),
        )
    )

    assert run("down") == 0
    assert left.wait(60) != 0
    assert not runtime.exists()
    assert home.read() is None


def test_a_second_fleet_of_the_same_name_is_refused(home, capsys):
    home.create()
    home.lock()
    home.write(
        RunState(
            run="r",
            supervisor=os.getpid(),
            started_ticks=start_ticks(os.getpid()),
            phase="ready",
            endpoint="http://127.0.0.1:7",
        )
    )
    try:
        assert run("up", "--port", "0") == 2
        assert "already up at http://127.0.0.1:7" in words(capsys)
    finally:
        home.unlock()


def test_status_of_a_router_that_does_not_answer_says_so(home, capsys):
    home.create()
    home.write(
        RunState(
            run="r",
            supervisor=os.getpid(),
            started_ticks=start_ticks(os.getpid()),
            phase="ready",
            endpoint="http://127.0.0.1:1",
        )
    )

    assert run("status", "--json") == 2
    assert "does not answer" in words(capsys)


def test_status_of_a_fleet_that_starts_is_its_phase(home, capsys):
    home.create()
    home.write(
        RunState(
            run="r",
            supervisor=os.getpid(),
            started_ticks=start_ticks(os.getpid()),
            phase="starting",
        )
    )

    assert run("status", "--json") == 0
    assert json.loads(capsys.readouterr().out)["phase"] == "starting"


@pytest.mark.parametrize("name", sorted(PASSED_ON))
def test_what_is_passed_on_is_listed_and_has_a_help(name):
    shown = subprocess.run(
        [sys.executable, "-m", "prefixfleet.cluster", name, "--help"],
        capture_output=True, text=True, check=True,
    )  # fmt: skip

    assert "usage:" in shown.stdout
    assert name in parser().format_help()


def test_help_needs_no_ray_no_torch_and_no_engine():
    """The wheel without extras must run it."""
    script = (
        "import sys, prefixfleet.cluster.__main__ as m; m.parser().format_help(); "
        "print(sorted({'ray', 'torch', 'vllm', 'ucxx'} & set(sys.modules)))"
    )

    shown = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)

    assert shown.stdout.strip() == "[]"


@pytest.mark.parametrize("detach", [[], ["--detach"]])
def test_an_encoding_reaches_every_worker_and_none_leaves_their_own_setting(model, detach):
    def told(*arguments):
        options = parser().parse_args(["up", "--model", str(model), *detach, *arguments])
        again = parser().parse_args(["up", *commands._arguments(options)])  # by --detach
        wish = commands._wish(again)
        return up.process_environ(wish, "redis://h", model).get("PREFIXFLEET_WORKER_ENCODING")

    assert told("--encoding", "int8-fp8") == "int8-fp8"
    assert told() is None
