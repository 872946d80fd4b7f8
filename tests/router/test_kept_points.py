"""Points of the policy grid that are kept in a file: computed once, then read."""

import json
from concurrent.futures import Future

import kept_points
import pytest
from kept_points import computed, kept
from policy_grid import Point

FIRST = Point("conversation", 1.0, 12.5, "ours", 10)
SECOND = FIRST._replace(policy="random")


class Inline:
    """An executor that computes at once."""

    def submit(self, function, *arguments):
        future = Future()
        future.set_result(function(*arguments))
        return future


@pytest.fixture
def runs(monkeypatch):
    """The points that were simulated."""
    made = []
    monkeypatch.setattr(kept_points, "run", lambda p: made.append(p) or {"policy": p.policy})
    return made


def test_what_was_computed_is_not_computed_again(tmp_path, runs):
    path = tmp_path / "points.jsonl"
    list(computed([FIRST], Inline(), path))

    found = dict(computed([FIRST, SECOND, SECOND], Inline(), path))

    assert runs == [FIRST, SECOND]
    assert found == dict(kept(path)) == {FIRST: {"policy": "ours"}, SECOND: {"policy": "random"}}


def test_without_a_file_all_is_computed(runs):
    assert dict(computed([FIRST], Inline(), None)) == {FIRST: {"policy": "ours"}}
    assert runs == [FIRST]


@pytest.mark.parametrize(
    "line", ['{"point": ', "[]", json.dumps({"point": {"workload": "agents"}, "figures": {}})]
)
def test_a_line_that_is_none_of_ours_is_named(tmp_path, line):
    path = tmp_path / "points.jsonl"
    path.write_text(line + "\n")
    with pytest.raises(ValueError, match=r"points\.jsonl, line 1"):
        list(kept(path))
