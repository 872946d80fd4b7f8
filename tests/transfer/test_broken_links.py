"""A source that is killed, freezes or loses its cable in the middle of a pull, some times over.

`tests/bench/broken_links.py` does the same a hundred times.
"""

import asyncio

import broken_pulls
import cut_links
import netns
import pytest
from links import NETWORK_KINDS

COUNT = 5
pytestmark = pytest.mark.timeout(400)
WAYS = {"kill": broken_pulls.killed, "freeze": broken_pulls.frozen}


def check(trials):
    figures = broken_pulls.summary(trials)
    assert (figures["hangs"], figures["wrong"]) == (0, 0), trials
    assert figures["broken"] == COUNT, "too few pulls were under way when their source broke"


@pytest.mark.parametrize("kind", NETWORK_KINDS)
@pytest.mark.parametrize("way", WAYS)
async def test_a_source_that_breaks_is_a_shorter_prefix_of_right_bytes(way, kind):
    check(await WAYS[way](kind, COUNT))


@pytest.mark.skipif(bool(netns.missing()), reason=f"namespace hosts: {netns.missing()}")
@pytest.mark.parametrize("kind", ["tcp"])
async def test_a_cable_that_is_pulled_is_a_shorter_prefix_of_right_bytes(tmp_path, kind):
    check(await asyncio.to_thread(cut_links.cut, tmp_path, kind, COUNT))
