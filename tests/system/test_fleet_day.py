"""A fleet of fast engines under load, by `prefixfleet up`: broken, updated; no client notices."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

BENCH = Path(__file__).parents[1] / "bench/fleet.py"


@pytest.mark.timeout(900)
def test_what_is_killed_comes_back_and_all_are_updated_without_an_error_but_on_its_open_streams():
    parts = ["--parts", "killed_engine", "killed_daemon", "killed_redis", "update"]

    run = subprocess.run(
        [sys.executable, str(BENCH), "--json", "--nodes", "2", "--rate", "4", *parts],
        capture_output=True, text=True, timeout=880,
    )  # fmt: skip

    assert run.returncode == 0, run.stderr
    found = json.loads(run.stdout.splitlines()[-1])
    assert found["killed_engine"]["others"] == []
    assert found["killed_daemon"]["others"] == []
    assert found["killed_redis"]["errors"] == []
    assert found["killed_redis"]["hit_rate_before"] > 0.5
    assert found["update"]["errors"] == []
    assert found["update"]["requests"] > 0
    assert found["update"]["hit_rate_after"] > 0.8 * found["update"]["hit_rate_before"]
