"""Benches refuse what makes no figures, before they measure: one line, no traceback."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

BENCHES = Path(__file__).parents[1] / "bench"


@pytest.mark.parametrize(
    ("words", "what"),
    [
        (["eviction.py", "EMPTY"], "no requests in it"),
        (["eviction.py", "TRACE", "--sizes", "0"], "--sizes: got"),
        (["eviction.py", "TRACE", "--processes", "0"], "got 0, expected"),
        (["disk_admission.py", "EMPTY"], "no requests in it"),
        (["disk_admission.py", "TRACE", "--disk", "0"], "got 0, expected"),
        (["policies.py", "--requests", "0"], "got 0, expected"),
        (["policies.py", "--jobs", "0"], "got 0, expected"),
        (["policies.py", "--workload", "EMPTY"], "no requests in it"),
        (["policies.py", "--resume", "FOLDER"], "got a folder"),
        (["policies.py", "--resume", "TRACE"], "expected a kept point"),
        (["partial_blocks.py", "EMPTY"], "no requests in it"),
        (["partial_blocks.py", "TRACE", "--block-tokens", "0"], "--block-tokens: got"),
        (["store.py", "--blocks", "0"], "got 0, expected"),
        (["store.py", "--disk-mib", "0"], "got 0, expected"),
        (["replay.py", "--requests", "0"], "got 0, expected"),
        (["replay.py", "--rounds", "0"], "got 0, expected"),
    ],
)
def test_what_makes_no_figures_is_refused(tmp_path, words, what):
    line = {"timestamp": 0, "input_length": 600, "output_length": 1, "hash_ids": [0, 1]}
    (tmp_path / "trace.jsonl").write_text(json.dumps(line))
    (tmp_path / "empty.jsonl").write_text("")
    named = {"EMPTY": "empty.jsonl", "TRACE": "trace.jsonl", "FOLDER": ""}
    command = [str(tmp_path / named[w]) if w in named else w for w in words[1:]]

    done = subprocess.run(
        [sys.executable, str(BENCHES / words[0]), *command],
        capture_output=True, text=True, timeout=100,
    )  # fmt: skip

    assert done.returncode == 2
    assert what in " ".join(done.stderr.split())
    assert "Traceback" not in done.stderr
