"""Bytes from outside: every parser takes them or refuses them in its own words, nothing else."""

import os
from pathlib import Path

import pytest
from fuzz_bytes import hostile_bytes
from fuzz_targets import TARGETS
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

CORPUS = Path(__file__).with_name("corpus")
EXAMPLES = int(os.environ.get("FUZZ_EXAMPLES", "48"))
"""A parser and a run; `make fuzz` sets more."""


@pytest.mark.parametrize("name", TARGETS)
def test_right_bytes_are_taken(name):
    """Else the other tests here would try refusals only."""
    target = TARGETS[name]
    taken = [target.try_bytes(seed) for seed in target.seeds]

    assert all(taken) or name in ("peer-answer", "signature")  # which hold a refusal on purpose


@pytest.mark.parametrize("name", TARGETS)
@settings(max_examples=EXAMPLES, suppress_health_check=list(HealthCheck), database=None)
@given(data=st.data())
def test_any_bytes_are_taken_or_refused(name, data):
    target = TARGETS[name]

    target.try_bytes(data.draw(hostile_bytes(target.seeds)))


@pytest.mark.parametrize(
    "path", sorted(CORPUS.glob("*/*")), ids=lambda path: f"{path.parent.name}/{path.name}"
)
def test_what_once_broke_a_parser_is_refused_or_taken_now(path):
    TARGETS[path.parent.name].try_bytes(path.read_bytes())


def test_every_file_of_the_corpus_belongs_to_a_parser():
    assert {path.name for path in CORPUS.iterdir()} <= set(TARGETS)
