"""The short form of `make chaos`: two routers, two nodes, one round of every kind of fault, then
every total outage; and one of two engines a real one."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from chaos_plan import KINDS

RUN = Path(__file__).with_name("run.py")


def report_of(*options, limit_s=1150):
    """The report of a run with ``options``."""
    done = subprocess.run(
        [sys.executable, str(RUN), *options], capture_output=True, text=True, timeout=limit_s
    )
    assert done.stdout, done.stderr
    report = json.loads(done.stdout.splitlines()[-1])
    telling = {key: report[key] for key in (*report["failed"], "details") if key in report}
    assert report["failed"] == [], json.dumps(telling)
    return report


@pytest.mark.timeout(1200)
def test_a_fleet_that_is_broken_in_every_way_gives_no_wrong_answer_and_recovers():
    small = ("--nodes", "2", "--routers", "2", "--clients", "2")

    report = report_of("--seed", "7", "--seconds", "300", "--rounds", "1", *small)

    assert report["by_kind"] == dict.fromkeys(sorted(KINDS), 1)
    assert report["requests"] > len(KINDS)
    assert report["errors_official"] == {}
    assert len(report["outages"]) == 6


@pytest.mark.engine
@pytest.mark.timeout(2400)
def test_a_real_engine_in_a_broken_fleet_answers_as_it_did_alone():
    small = ("--nodes", "3", "--routers", "2", "--clients", "1", "--real", "1")

    report = report_of("--seed", "3", "--seconds", "40", *small, limit_s=2300)

    assert report["real"]["answered"] > 0
    assert report["wrong"] == report["hung"] == 0
