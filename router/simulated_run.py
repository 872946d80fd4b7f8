"""One trace through one simulated fleet, and the figures of what came of it."""

import dataclasses
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from prefixfleet.router.arguments import Failure
from prefixfleet.router.percentiles import spread
from prefixfleet.router.simulated_fleet import Fleet, Served
from prefixfleet.router.simulator import Simulation
from prefixfleet.router.text_blocks import BLOCK_TOKENS, BYTES_PER_TOKEN
from prefixfleet.router.traces import Arrival, SharedBlocks, read_trace
from prefixfleet.store.errors import ConfigError
from prefixfleet.store.replication import Mode


def summarise(served: Sequence[Served], *, ttft_slo_s: float) -> dict[str, Any]:
    """Figures of one run: TTFT of the accepted, hit rate by tokens, goodput, refusals."""
    accepted = [s for s in served if not s.refused]
    tokens = sum(s.tokens for s in accepted) or 1
    span = (served[-1].at_s - served[0].at_s) or 1.0 if served else 1.0
    return {
        "requests": len(served),
        "refused": len(served) - len(accepted),
        "ttft_s": spread([s.ttft_s for s in accepted]),
        "goodput_per_s": sum(s.ttft_s <= ttft_slo_s for s in accepted) / span,
        "hit_rate": sum(s.local_tokens + s.pulled_tokens for s in accepted) / tokens,
        "pulled_share": sum(s.pulled_tokens for s in accepted) / tokens,
        "estimate_error_s": spread([abs(s.ttft_s - s.estimate_s) for s in accepted]),
    }


def speed_up(arrivals: Sequence[Arrival], factor: float) -> list[Arrival]:
    """The same requests ``factor`` times as fast."""
    return [dataclasses.replace(a, at_s=a.at_s / factor) for a in arrivals]


def simulate(
    fleet: Fleet,
    arrivals: Sequence[Arrival],
    *,
    ttft_slo_s: float | None = None,
    failures: Sequence[Failure] = (),
) -> tuple[dict[str, Any], float]:
    """Figures and the wall seconds that the run took. ``ttft_slo_s`` is the limit that goodput
    counts by, where it is another one than that for admission."""
    started = time.perf_counter()
    simulation = Simulation(fleet)
    for number, at_s, away_s in failures:
        simulation.fail(number, at_s, away_s)
    served = simulation.run(arrivals)
    wall_s = time.perf_counter() - started
    simulation.check()
    limit_s = fleet.ttft_slo_s if ttft_slo_s is None else ttft_slo_s
    figures = summarise(served, ttft_slo_s=limit_s)
    if fleet.replication is not Mode.OFF:
        figures["replication"] = dict(simulation.broadcasts.counters)
    return figures, wall_s


def block_trace(path: Path, limit: int | None, tell: Callable[[str], None]) -> list[Arrival]:
    """A trace as block ids, prompts of text too; ``tell`` hears how those are guessed. Raises
    `ConfigError` for one whose blocks are not all of one size."""
    arrivals = read_trace(path, limit=limit, as_blocks=True)
    sizes = {a.prompt.block_tokens for a in arrivals if isinstance(a.prompt, SharedBlocks)}
    if len(sizes) > 1:
        raise ConfigError(
            f"trace {path}: blocks of {sorted(sizes)} tokens in one file, expected one size; "
            "traces of different forms are simulated one by one"
        )
    if sizes == {BLOCK_TOKENS}:
        tell(
            f"trace {path} holds prompts: {BYTES_PER_TOKEN} bytes of text count as a token, "
            f"{BLOCK_TOKENS} tokens as a block"
        )
    return arrivals
