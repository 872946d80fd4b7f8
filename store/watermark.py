"""How many slots stay free for requests in flight; the rest may hold prefixes. Pure.

At a low rate of requests free slots are waste: they could hold prefixes. At a high rate every
request that finds no free slot waits for the index and the eviction of others. So the number
follows what was taken lately: up at once when slots run short, down slowly, and only when the
need is clearly lower (hysteresis), so that it does not swing with every burst.
"""

from dataclasses import dataclass, replace

LEAST_SHARE = 1 / 64
MOST_SHARE = 1 / 4
HORIZON_S = 2.0
"""Free slots should last for so many seconds at the rate of the last while: an eviction with its
withdrawal from the index takes a few milliseconds, a stalled index a second or two."""
HALF_LIFE_S = 10.0
"""The observed rate falls to a half in this time when nothing is taken."""
SLACK = 0.5
"""The mark goes down only when less than this part of it is needed."""


@dataclass(frozen=True, slots=True)
class Watermark:
    """Free slots to keep, and the figures it follows. `start` makes the first one."""

    num_slots: int
    keep_free: int
    taken_per_s: float
    at_s: float

    @property
    def share(self) -> float:
        """Part of the pool that is kept for requests in flight."""
        return self.keep_free / self.num_slots


def start(num_slots: int, now: float) -> Watermark:
    """The mark of an idle pool."""
    return Watermark(num_slots, _least(num_slots), 0.0, now)


def resize(mark: Watermark, num_slots: int) -> Watermark:
    """The mark of a pool that has grown or shrunk; `follow` brings it within the new bounds."""
    return replace(mark, num_slots=num_slots)


def follow(mark: Watermark, *, taken: int, waiting: int, refused: int, now: float) -> Watermark:
    """The mark after ``taken`` slots were handed out since the last call.

    ``waiting`` slots are wanted by requests that queue now; ``refused`` could not be handed out
    since the last call: memory pressure, which counts like slots taken at once.
    """
    elapsed = max(1e-3, now - mark.at_s)
    fade = 0.5 ** (elapsed / HALF_LIFE_S)
    # an average over the half-life: a burst within one call must not count as a lasting rate
    rate = mark.taken_per_s * fade + (taken + refused) / elapsed * (1 - fade)
    need = round(rate * HORIZON_S) + waiting + refused
    least, most = _least(mark.num_slots), _most(mark.num_slots)
    need = min(max(need, least), most)
    keep = min(mark.keep_free, most)
    if need > keep or need < keep * SLACK or need == least:
        keep = need
    return replace(mark, keep_free=keep, taken_per_s=rate, at_s=now)


def _least(num_slots: int) -> int:
    return min(num_slots, max(1, round(num_slots * LEAST_SHARE)))


def _most(num_slots: int) -> int:
    return min(num_slots, max(1, round(num_slots * MOST_SHARE)))
