"""Which namespace gives a slab to which: the memory goes where blocks are younger. Pure.

Where several namespaces share a node's memory each evicts by an order of its own, over blocks of
its own size and price. What can be compared is how long a block stays: a slab goes from who keeps
blocks that nobody asked for in a long while to who has to evict what was used a moment ago, as one
eviction order over all of them would do. Two that are equally busy keep what they have.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

Name = TypeVar("Name")

OLDER = 2.0
"""A slab moves only from blocks that are so many times as old: what it changes must not undo it."""
LEAST_AGE_S = 10.0
"""Nor from blocks that were used in the last while, whatever others do."""
FLOOR_SHARE = 1 / 4
"""Of an equal share of the memory: so much nobody loses while an engine of it is here."""


@dataclass(frozen=True, slots=True)
class Holding(Generic[Name]):
    """One namespace on this node. ``wants``: it evicts to store. ``idle_s``: how long ago that part
    of its memory was used that nobody used for longest, a block or a slab to spare. ``stuck``:
    what it gave last was in use, it gives nothing for a while. ``ends``: it gives all, but for
    those ``least`` slabs that it keeps without an engine too."""

    name: Name
    slabs: int
    engines: int
    wants: bool
    idle_s: float
    stuck: bool = False
    ends: bool = False
    least: int = 0


@dataclass(frozen=True, slots=True)
class Move(Generic[Name]):
    """One slab that changes hands. ``due``: its giver ends, or its taker is below its floor."""

    giver: Name
    taker: Name
    due: bool = False


def floor_of(holdings: Sequence[Holding[Name]]) -> int:
    """Slabs that each namespace with an engine keeps; at least one."""
    served = sum(1 for holding in holdings if holding.engines)
    return max(1, int(sum(h.slabs for h in holdings) * FLOOR_SHARE / max(1, served)))


def next_move(holdings: Sequence[Holding[Name]]) -> Move[Name] | None:
    """The next slab to move, or None when all may stay as it is.

    Who has less than its floor takes first, then who keeps its blocks for the shortest time. Who
    ends gives first, also to who wants nothing, then who has no engine.
    """
    floor = floor_of(holdings)
    below = [h for h in holdings if h.engines and h.slabs < floor]
    taker = _taker(holdings, below)
    if taker is None:
        return None
    able = [h for h in holdings if h is not taker and not h.stuck]
    able = [h for h in able if h.slabs > (floor if h.engines else h.least)]
    giver = max(able, key=lambda h: (h.ends, not h.engines, h.idle_s, h.slabs), default=None)
    if giver is None or not (below or _is_older(giver, taker)):
        return None
    return Move(giver.name, taker.name, due=bool(below) or giver.ends)


def _taker(
    holdings: Sequence[Holding[Name]], below: Sequence[Holding[Name]]
) -> Holding[Name] | None:
    if below:
        return min(below, key=lambda h: h.slabs)
    if wanting := [h for h in holdings if h.engines and h.wants]:
        return min(wanting, key=lambda h: h.idle_s)
    if any(h.ends and h.slabs > h.least and not h.stuck for h in holdings):
        stays = [h for h in holdings if not h.ends]
        return min(stays, key=lambda h: (not h.engines, h.slabs), default=None)
    return None


def _is_older(giver: Holding[Name], taker: Holding[Name]) -> bool:
    return not giver.engines or giver.idle_s > max(LEAST_AGE_S, OLDER * taker.idle_s)
