"""Percentiles speak of the unlucky requests, wherever they are shown."""

import io
import random

import msgspec
import pytest
from rich.console import Console

from prefixfleet.cluster.router_status import checked
from prefixfleet.cluster.status import show_status
from prefixfleet.router.dashboard import snapshot_of
from prefixfleet.router.percentiles import percentile, reach, reached, spread
from prefixfleet.router.replay_client import Sample
from prefixfleet.router.replay_stats import hit_rate
from prefixfleet.router.reuse import Reuse, hit_rates
from prefixfleet.router.status import status_of
from prefixfleet.router.top import screen

LUCKY_BUT_ONE = [0.0, *[0.9] * 99]
"""99 of 100 requests find 0.9 of their prompts, one finds nothing."""
LUCKY_BUT_TWO = [0.0, 0.0, *[0.9] * 98]


def test_percentiles_are_values_that_occurred():
    assert [percentile([3, 1, 2], p) for p in (0, 50, 90, 100)] == [1, 2, 3, 3]
    assert [reached([3, 1, 2], p) for p in (0, 50, 90, 100)] == [3, 2, 1, 1]
    assert (percentile([], 50), reached([], 50)) == (0.0, 0.0)


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("percent", [50, 90, 99])
def test_so_many_of_a_hundred_reach_it_and_fewer_reach_more(seed, percent):
    draw = random.Random(seed)
    values = [draw.random() for _ in range(draw.randrange(1, 300))]

    found = reach(values)[f"p{percent}"]

    assert sum(v >= found for v in values) >= percent / 100 * len(values)
    assert sum(v > found for v in values) < percent / 100 * len(values)


def test_of_seconds_and_of_hit_rates_the_last_hundredth_is_the_worst_one():
    seconds = [0.1] * 98 + [9.0, 9.0]

    assert (spread(seconds)["p50"], spread(seconds)["p99"]) == (0.1, 9.0)
    assert (reach(LUCKY_BUT_ONE)["p50"], reach(LUCKY_BUT_ONE)["p99"]) == (0.9, 0.9)
    assert (reach(LUCKY_BUT_TWO)["p50"], reach(LUCKY_BUT_TWO)["p99"]) == (0.9, 0.0)


async def test_status_dashboard_top_replay_and_plan_say_the_same_of_the_same_requests(rig):
    router = await rig.start(await rig.engine())
    random.Random(1).shuffle(ratios := LUCKY_BUT_TWO[:])
    router.hit_ratios.extend(ratios)
    samples = [
        Sample(sent_s=0, late_s=0, prompt_tokens=10, cached_tokens=round(10 * r)) for r in ratios
    ]
    requests = [Reuse(10, (1,) * round(10 * r), n) for n, r in enumerate(ratios)]
    planned = hit_rates(requests, 1, 1)

    shown = status_of(router)["hit_rate"]

    assert shown["count"] == 100
    for other in (snapshot_of(router)["hit_rate"], hit_rate(samples)):
        assert [other[p] for p in ("p50", "p90", "p99")] == [0.9, 0.9, 0.0]
    assert [shown[p] for p in ("p50", "p90", "p99")] == [0.9, 0.9, 0.0]
    assert [planned.p50, planned.p90, planned.p99] == [0.9, 0.9, 0.0]


async def test_where_they_are_shown_it_is_said_what_they_mean(rig):
    router = await rig.start(await rig.engine())
    router.hit_ratios.extend(LUCKY_BUT_TWO)
    console = Console(file=io.StringIO(), width=200)

    told = checked(msgspec.json.decode(msgspec.json.encode(status_of(router))), "e/status")
    show_status({"fleet": "f", "phase": "ready", "endpoint": "e"} | told, console)
    console.print(screen(snapshot_of(router)))

    text = console.file.getvalue()
    assert text.count("99 of 100") == 2
    assert "p99 0.00" in text
