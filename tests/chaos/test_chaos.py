"""The short form of `make chaos`: one router, two nodes, one round of every kind of fault; and one
of two engines a real one."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

RUN = Path(__file__).with_name("run.py")
KINDS = 18


def report_of(*options, limit_s=1150):
    """The report of a run with ``options``."""
    done = subprocess.run(
        [sys.executable, str(RUN), *options], capture_output=True, text=True, timeout=limit_s
    )
    assert done.stdout, done.stderr
    report = json.loads(done.stdout.splitlines()[-1])
    assert report["failed"] == [], report
    return report


@pytest.mark.timeout(1200)
def test_a_fleet_that_is_broken_in_every_way_gives_no_wrong_answer_and_recovers():
    small = ("--nodes", "2", "--routers", "1", "--clients", "2")

    report = report_of("--seed", "7", "--seconds", "300", "--faults", str(KINDS), *small)

    assert len(report["by_kind"]) == KINDS
    assert report["requests"] > KINDS


@pytest.mark.engine
@pytest.mark.timeout(2400)
def test_a_real_engine_in_a_broken_fleet_answers_as_it_did_alone():
    small = ("--nodes", "2", "--routers", "1", "--clients", "1", "--real", "1")

    report = report_of("--seed", "3", "--seconds", "40", *small, limit_s=2300)

    assert report["real"]["answered"] > 0
    assert report["wrong"] == report["hung"] == 0
