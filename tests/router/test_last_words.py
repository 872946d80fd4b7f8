"""What a program found is not lost at its end, and no end is a traceback."""

import asyncio
import json
import os
import signal
import subprocess
import sys

import pytest
from eventually import until
from openai_endpoint import Endpoint, line

from prefixfleet.router import plan, replay


@pytest.fixture
def trace(tmp_path):
    path = tmp_path / "trace.jsonl"
    path.write_text("\n".join([line(0), line(20)]))
    return path


def test_a_target_that_cannot_be_written_is_refused_before_the_work(trace, tmp_path, capsys):
    words = ["--trace", str(trace), "--endpoint", "http://127.0.0.1:9"]
    for option in ("--out", "--html"):
        for target, why in ((tmp_path, "got a folder"), (tmp_path / "no/x", "is no folder")):
            assert replay.main([*words, option, str(target)]) == 2
            said = capsys.readouterr()
            assert why in " ".join(said.err.split())
    absent = ["--trace", str(tmp_path / "none"), "--model", "none", "--hardware", "8xA800"]
    assert plan.main([*absent, "--html", str(tmp_path / "no/x")]) == 2
    assert "is no folder" in " ".join(capsys.readouterr().err.split())


def test_figures_are_printed_where_their_file_cannot_be_written(trace, capsys):
    with Endpoint() as endpoint:
        words = ["--trace", str(trace), "--endpoint", endpoint.url]
        assert replay.main([*words, "--out", "/dev/full"]) == 1

    said = capsys.readouterr()
    assert json.loads(said.out)["requests"] == 2
    assert "is not written" in " ".join(said.err.split())


def command(module, *words):
    return [sys.executable, "-m", f"prefixfleet.router.{module}", *map(str, words)]


@pytest.mark.parametrize("stdout", ["full", "closed"])
def test_standard_output_that_takes_nothing_is_one_line(trace, stdout):
    words = command("simulate", "--trace", trace, "--policy", "ours", "--json")
    shell = ["sh", "-c", '"$@" ' + {"full": ">/dev/full", "closed": ">&-"}[stdout], "sh", *words]

    done = subprocess.run(shell, stderr=subprocess.PIPE, text=True, timeout=100)

    assert done.returncode == 1
    assert "Traceback" not in done.stderr
    assert "standard output" in " ".join(done.stderr.split())


def test_a_replay_that_is_interrupted_reports_what_had_ended(tmp_path):
    trace, out = tmp_path / "trace.jsonl", tmp_path / "run.json"
    trace.write_text("\n".join([line(0), line(1), line(3_600_000)]))
    with Endpoint() as endpoint:
        words = command("replay", "--trace", trace, "--endpoint", endpoint.url, "--out", out)
        running = subprocess.Popen(
            words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
            env=os.environ | {"COLUMNS": "200"},
        )  # fmt: skip
        asyncio.run(until(lambda: endpoint.answered == 2, timeout_s=60))
        running.send_signal(signal.SIGINT)
        shown, complaints = running.communicate(timeout=60)

    figures = json.loads(shown)
    assert running.returncode == 130
    assert "Traceback" not in complaints
    assert (figures["cut_short"], figures["requests_in_trace"]) == (True, 3)
    assert figures["requests"] <= 2
    assert json.loads(out.read_text())["figures"] == figures


@pytest.mark.parametrize("module", ["simulate", "plan"])
def test_an_interruption_is_no_traceback(module, tmp_path):
    os.mkfifo(fifo := tmp_path / "trace.jsonl")
    (tmp_path / "config.json").write_text("{}")
    words = command(module, "--trace", fifo)
    words += ["--model", str(tmp_path), "--hardware", "8xA800"] if module == "plan" else []
    running = subprocess.Popen(words, stderr=subprocess.PIPE, text=True)
    with fifo.open("w"):  # opened when the program reads it
        running.send_signal(signal.SIGINT)
        _, complaints = running.communicate(timeout=60)

    assert running.returncode == 130
    assert "Traceback" not in complaints
