"""Slices of traces that a small machine can replay: requests that share something, made shorter."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

from traces import TRACES
from workloads import WORKLOADS

from prefixfleet.router.synthetic_prompts import scale
from prefixfleet.router.traces import Arrival, SharedBlocks, read_trace

LENGTH = 1 / 8
"""Of a trace's prompt: its blocks of 512 tokens become 64 tokens."""
MOST_TOKENS = 2_000
OUTPUT_TOKENS = 4
READ = 4_000
"""Requests of a trace from which the slice is taken."""
OWN_BLOCKS = 4
"""Requests with the same so many first blocks belong together; what all begin with is shorter."""
GENERATED = "documents"


def slices(count: int, pause_s: float, rounds: int = 1) -> dict[str, list[list[Arrival]]]:
    """Of each trace at hand, or else of a generated workload whose name says so: ``rounds`` slices
    of at most ``count`` requests, one every ``pause_s``, no conversation in two of them."""
    traces = {path.name: read_trace(path, limit=READ) for path in sorted(TRACES.glob("*.jsonl*"))}
    if not traces:
        traces = {f"generated: {GENERATED}": _generated()}
    return {
        name: [_paced(part, pause_s) for part in _going_on(read, [count] * rounds)]
        for name, read in traces.items()
    }


def found_at_most(arrivals: Sequence[Arrival]) -> float:
    """Part of the tokens of a slice that an earlier request of it has computed."""
    known: set[int] = set()
    found = total = 0
    for prompt in (arrival.prompt for arrival in arrivals):
        assert isinstance(prompt, SharedBlocks)
        first_new = (i for i, block in enumerate(prompt.ids) if block not in known)
        found += next(first_new, len(prompt.ids)) * prompt.block_tokens
        total += prompt.tokens
        known.update(prompt.ids)
    return found / total


def _generated() -> list[Arrival]:
    chains = [request.chain for request in WORKLOADS[GENERATED]()[:READ]]
    prompts = [SharedBlocks(_ids(chain), 512 * len(chain), 512) for chain in chains]
    return [Arrival(0.0, prompt, OUTPUT_TOKENS) for prompt in prompts]


def _going_on(arrivals: Sequence[Arrival], room: list[int]) -> list[list[Arrival]]:
    """The first conversations of more than one request, whole, in the order of the trace; scaled,
    without requests that are too long. Each is in the first slice that has ``room`` for it."""
    short = []
    for arrival in arrivals:
        prompt = arrival.prompt
        if isinstance(prompt, SharedBlocks) and len(prompt.ids) > OWN_BLOCKS:
            scaled = scale(prompt, LENGTH)
            if scaled.tokens <= MOST_TOKENS:
                short.append((prompt.ids[:OWN_BLOCKS], replace(arrival, prompt=scaled)))
    asked = Counter(root for root, _ in short)
    parts: dict[tuple[int, ...], int] = {}
    for root, _ in short:
        fits = (part for part, left in enumerate(room) if asked[root] <= left)
        if root not in parts and asked[root] > 1 and (part := next(fits, None)) is not None:
            parts[root] = part
            room[part] -= asked[root]
    return [
        [arrival for root, arrival in short if parts.get(root) == part] for part in range(len(room))
    ]


def _paced(arrivals: Sequence[Arrival], pause_s: float) -> list[Arrival]:
    return [
        replace(arrival, at_s=number * pause_s, output_tokens=OUTPUT_TOKENS)
        for number, arrival in enumerate(arrivals)
    ]


def _ids(chain: Sequence[bytes]) -> tuple[int, ...]:
    return tuple(int.from_bytes(block[:8]) for block in chain)
