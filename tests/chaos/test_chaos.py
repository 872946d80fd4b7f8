"""The short form of `make chaos`: one router, two nodes, one round of every kind of fault."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

RUN = Path(__file__).with_name("run.py")
KINDS = 18


@pytest.mark.timeout(1200)
def test_a_fleet_that_is_broken_in_every_way_gives_no_wrong_answer_and_recovers():
    command = [sys.executable, str(RUN), "--seed", "7", "--seconds", "300", "--faults", str(KINDS)]
    done = subprocess.run(
        [*command, "--nodes", "2", "--routers", "1", "--clients", "2"],
        capture_output=True,
        text=True,
        timeout=1150,
    )

    assert done.stdout, done.stderr
    report = json.loads(done.stdout.splitlines()[-1])
    assert report["failed"] == [], report
    assert len(report["by_kind"]) == KINDS
    assert report["requests"] > KINDS
