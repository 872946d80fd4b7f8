"""The table of reported faults names tests that exist."""

import re
from pathlib import Path

TABLE = Path(__file__).with_name("FAULTS.md")
TESTS = Path(__file__).parents[1]


def test_every_test_of_the_table_exists():
    named = re.findall(r"`(test_\w+\.py)::(test_\w+)`", TABLE.read_text())

    missing = [
        f"{file}::{name}"
        for file, name in named
        if not any(f"def {name}(" in path.read_text() for path in TESTS.rglob(file))
    ]

    assert len(named) > 30
    assert missing == []
