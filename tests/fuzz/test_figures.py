"""The counts of `figures.py` are those that hypothesis prints."""

from fuzz_counts import inputs

SAID = """
tests/fuzz/test_parsers.py::test_any_bytes_are_taken_or_refused[outcome]:

  - during generate phase (0.08 seconds):
    - 40 passing, 0 failing, and 8 invalid test cases

  - during shrink phase (0.01 seconds):
    - 1 passing, 2 failing, and 0 invalid test cases

tests/fuzz/test_ssd_files.py::test_any_file_is_recovered:

  - during generate phase (0.08 seconds):
    - 12 passing, 0 failing, and 0 invalid test cases
"""


def test_inputs_are_counted_by_edge():
    assert inputs(SAID) == ({"outcome": 51, "ssd_files: test_any_file_is_recovered": 12}, 2)


def test_a_report_without_counts_has_none():
    assert inputs("12 passed") == ({}, 0)
