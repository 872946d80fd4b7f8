"""Made-up conversations for the simulator: who shares what is known by construction."""

import json
import random
from collections.abc import Sequence
from pathlib import Path

from prefixfleet.router.traces import Arrival, SharedBlocks

BLOCK = 512


def conversations(users: int, turns: int, *, seed: int = 0, gap_s: float = 8.0) -> list[Arrival]:
    """Users whose every turn extends the one before; ids shared by nobody else."""
    source = random.Random(seed)
    arrivals = []
    for user in range(users):
        at = source.uniform(0, gap_s)
        ids = [user * 10_000]
        for _ in range(turns):
            ids += [ids[-1] + i + 1 for i in range(source.randrange(4, 12))]
            arrivals.append(Arrival(at, SharedBlocks(tuple(ids), len(ids) * BLOCK, BLOCK), 100))
            at += source.expovariate(1 / gap_s)
    return sorted(arrivals, key=lambda a: a.at_s)


def write_trace(path: Path, arrivals: Sequence[Arrival]) -> None:
    """``arrivals``, of block ids, in Mooncake's form."""
    path.write_text("".join(_line(arrival) for arrival in arrivals))


def _line(arrival: Arrival) -> str:
    prompt = arrival.prompt
    assert isinstance(prompt, SharedBlocks)
    fields = {
        "timestamp": round(1000 * arrival.at_s),
        "input_length": prompt.tokens,
        "output_length": arrival.output_tokens,
        "hash_ids": list(prompt.ids),
    }
    return json.dumps(fields) + "\n"
