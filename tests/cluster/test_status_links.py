"""What ``prefixfleet status`` shows of the links between nodes."""

import io

from rich.console import Console

from prefixfleet.cluster.status import show_status

SPEED = {"bytes_per_s": 2.5e9, "setup_s": 0.001, "queued_bytes": 0, "pulls": 7}


def shown(links):
    status = {
        "fleet": "f",
        "phase": "up",
        "endpoint": "http://h",
        "nodes": [
            {
                "node": "b",
                "epoch": 1,
                "suspect": False,
                "stats": {"links": links, "lanes": {"ucx": "ucx:tcp/eth0"}},
            }
        ],
        "workers": [],
        "hit_rate": {},
        "degraded": [],
    }
    out = io.StringIO()
    show_status(status, Console(file=out, width=200))
    return [line for line in out.getvalue().splitlines() if " a " in line]


def test_every_used_link_shows_its_speed_and_the_one_taken_shows_why():
    slow = SPEED | {"bytes_per_s": 1e9}
    chosen = {"link": "ucx", "why": "measured fastest", "links": {"tcp": slow, "ucx": SPEED}}

    tcp, ucx = shown({"a": chosen})

    assert all(part in ucx for part in ("measured fastest", "ucx:tcp/eth0", "2500", "1.0", "7"))
    assert "1000" in tcp
    assert "measured" not in tcp


def test_without_pulls_there_is_nothing_to_show():
    assert shown({}) == []
