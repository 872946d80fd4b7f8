"""What ``prefixfleet status`` shows of the links between nodes."""

import io

import pytest
from rich.console import Console

from prefixfleet.cluster.status import show_status

SPEED = {"bytes_per_s": 2.5e9, "setup_s": 0.001, "queued_bytes": 0, "pulls": 7}


def shown(links, **stats):
    return [line for line in whole(links, **stats) if " a " in line]


def whole(links, **stats):
    status = {
        "fleet": "f",
        "phase": "up",
        "endpoint": "http://h",
        "nodes": [
            {
                "node": "b",
                "epoch": 1,
                "lease": "held",
                "stats": {"links": links, "lanes": {"ucx": "ucx:tcp/eth0"}} | stats,
            }
        ],
        "workers": [],
        "hit_rate": {},
        "degraded": [],
    }
    out = io.StringIO()
    show_status(status, Console(file=out, width=200))
    return out.getvalue().splitlines()


def test_every_used_link_shows_its_speed_and_the_one_taken_shows_why():
    slow = SPEED | {"bytes_per_s": 1e9}
    chosen = {"link": "ucx", "why": "measured fastest", "links": {"tcp": slow, "ucx": SPEED}}

    tcp, ucx = shown({"a": chosen})

    assert all(part in ucx for part in ("measured fastest", "ucx:tcp/eth0", "2500", "1.0", "7"))
    assert "1000" in tcp
    assert "measured" not in tcp


def test_refused_callers_are_told_and_those_that_just_went_are_not():
    sessions = {"tcp": {"refused": 3, "protocol": 1, "peer_lost": 9}, "shm": {"closed": 2}}

    (line,) = [line for line in whole({}, sessions=sessions) if "refused callers" in line]

    assert line == "refused callers: b: tcp refused 3, tcp protocol 1"


@pytest.mark.parametrize("sessions", [None, [], {}, {"tcp": None}, {"tcp": {"refused": "x"}}])
def test_where_no_caller_was_refused_nothing_is_told(sessions):
    assert not [line for line in whole({}, sessions=sessions) if "refused" in line]


@pytest.mark.parametrize("number", [None, "1", []])
def test_a_node_whose_numbers_are_none_hides_no_other(number):
    """A number that JSON cannot say, such as infinity, comes from the router as null."""
    link = {"link": "tcp", "links": {"tcp": SPEED | {"bytes_per_s": number, "setup_s": number}}}
    tiers = {"dram": {"resident": number, "slot_bytes": number}}

    for hits in (number, {"block_s": number}):
        assert len(shown({"a": link}, tiers=tiers, hits=hits)) == 1


def test_without_pulls_there_is_nothing_to_show():
    assert shown({}) == []
