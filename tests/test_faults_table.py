"""The table of what went wrong elsewhere names tests that exist, for every row."""

import re
from pathlib import Path

TESTS = Path(__file__).parent
TABLE = TESTS / "FAULTS.md"
ROWS = {"Stores": 27, "Engines and layers": 39, "Routers": 36}
"""Rows that can be reproduced without special hardware, as they were collected."""


def rows():
    """(section, what is here) of each row."""
    section = ""
    for line in TABLE.read_text().splitlines():
        if line.startswith("## "):
            section = line[3:]
        elif line.startswith("| ") and not line.startswith("| reported as"):
            yield section, line.strip("| ").rsplit("|", 1)[1].strip()


def test_every_row_names_a_test_or_says_why_not():
    for _, here in rows():
        parts = [part.strip() for part in here.split(";")]
        assert all(re.match(r"(T test_|T Test|never: )", part) for part in parts), here


def test_every_test_that_is_named_exists():
    sources = "\n".join(path.read_text() for path in TESTS.rglob("test_*.py"))
    existing = set(re.findall(r"^ *(?:async )?def (test_\w+)", sources, re.MULTILINE))
    existing |= set(re.findall(r"^(Test\w+)\b", sources, re.MULTILINE))
    named = set(re.findall(r"\b(test_\w+|Test\w+)\b", "\n".join(here for _, here in rows())))

    assert named <= existing, sorted(named - existing)


def test_no_row_is_lost():
    found = [section for section, _ in rows()]

    assert {section: found.count(section) for section in ROWS} == ROWS
