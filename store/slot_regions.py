"""Which of several regions of a pool's slots is emptied at the least loss.

Of a few of them it is found out what would leave: the blocks in it and all that follow these.
"""

import asyncio
from collections.abc import Iterable, Mapping

from prefixfleet.store.pool import SlotPool

WEIGHED = 4
"""Regions of each kind of which it is found out what would leave with them."""

Regions = Mapping[int, range]


async def cheapest(pool: SlotPool, regions: Regions) -> int:
    """Of the regions that are used least, and those whose blocks lie deepest, the one with which
    fewest blocks go; what nobody can evict now counts before that. There must be one."""
    held = {name: pool.held(slots) for name, slots in regions.items()}
    by_use = sorted(regions, key=lambda name: (held[name], pool.in_use(regions[name])))
    by_depth = sorted(regions, key=lambda name: (held[name], -pool.depth_in(regions[name])))
    return await _fewest(pool, regions, held, (*by_depth[:WEIGHED], *by_use[:WEIGHED]))


async def oldest(pool: SlotPool, regions: Regions) -> int:
    """Of the regions whose blocks were not used for longest, the one with which fewest go; what
    nobody can evict now counts before both. There must be one."""
    held: dict[int, int] = {}
    age_s: dict[int, float] = {}
    for name, slots in regions.items():
        held[name], age_s[name] = pool.held(slots), pool.age_in(slots)
        await asyncio.sleep(0)  # a large disk has thousands of files
    by_age = sorted(regions, key=lambda name: (held[name], -age_s[name]))
    return await _fewest(pool, regions, held, by_age[:WEIGHED])


async def _fewest(
    pool: SlotPool, regions: Regions, held: Mapping[int, int], names: Iterable[int]
) -> int:
    best: tuple[int, int, int] | None = None  # of equal ones the first
    candidates = list(dict.fromkeys(names))
    for rank, name in enumerate(candidates):
        leaving = pool.standing_on(regions[name], most=best[1] if best else None)
        weighed = held[name], len(leaving), rank
        best = min(best, weighed) if best else weighed
        await asyncio.sleep(0)  # of a million slots each takes a while
    assert best is not None, "there is a region to empty"
    return candidates[best[2]]
