"""Requests as an eviction order sees them: a time and a chain of block hashes; from trace files.

A trace's ids are numbers from 0; hashes are made of them by a mixer, since an order may rely on
the digest being spread evenly.
"""

import os
from collections import Counter
from collections.abc import Iterable
from functools import cache
from pathlib import Path
from typing import NamedTuple

from prefixfleet.router.traces import Arrival, SharedBlocks, read_trace
from prefixfleet.store.chain import BlockHash

TRACES = Path(os.environ.get("TRACES_DIR", Path(__file__).parents[2].parent / "shared/traces"))
CONVERSATION = TRACES / "conversation_trace.jsonl.gz"
TICK_S = 3.0
"""The real traces tick: all arrivals of about three seconds bear one time stamp."""


class Request(NamedTuple):
    """``chain`` is asked for, from its root, ``at_s`` seconds after the start."""

    at_s: float
    chain: tuple[BlockHash, ...]


def read_requests(path: Path) -> list[Request]:
    """The requests of a trace of block ids, those of one tick spread evenly over it."""
    arrivals = read_trace(path)
    size = Counter(arrival.at_s for arrival in arrivals)
    seen: Counter[float] = Counter()
    requests = []
    for arrival in arrivals:
        at_s = arrival.at_s
        late = TICK_S * seen[at_s] / size[at_s] if size[at_s] > 1 else 0.0
        seen[at_s] += 1
        requests.append(Request(at_s + late, hashes(_ids(arrival))))
    return requests


def hashes(ids: Iterable[int]) -> tuple[BlockHash, ...]:
    """Block hashes of numbers that each stand for a block and everything before it."""
    return tuple(map(_hash, ids))


def _ids(arrival: Arrival) -> tuple[int, ...]:
    assert isinstance(arrival.prompt, SharedBlocks), "only traces of block ids are of use here"
    return arrival.prompt.ids


@cache
def _hash(number: int) -> BlockHash:
    """Splitmix64, twice: even, and as quick as numbers can be in Python."""
    return _mix(number).to_bytes(8, "little") + _mix(~number).to_bytes(8, "little")


def _mix(number: int) -> int:
    mask = (1 << 64) - 1
    z = (number * 0x9E3779B97F4A7C15 + 0x9E3779B97F4A7C15) & mask
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & mask
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & mask
    return z ^ (z >> 31)
