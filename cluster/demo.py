"""``prefixfleet demo``: a running fleet, a conversation about a document, the figures of sharing.

Needs a fleet that is up; starting and stopping one is `up`'s affair. Ends with a table, a summary
and one JSON object.
"""

import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from rich.console import Console
from rich.progress import Progress, TimeElapsedColumn
from rich.table import Table

from prefixfleet.cluster.demo_chat import QUESTIONS, Turn, converse
from prefixfleet.cluster.demo_figures import LINKS, Figures, measure, median
from prefixfleet.cluster.demo_fleet import DemoFleet
from prefixfleet.cluster.demo_text import excerpts
from prefixfleet.store.index import PrefixIndex
from prefixfleet.store.registry import WorkerRegistry

PROMPTS = 5
PROMPT_TOKENS = 1900
DOCUMENT_TOKENS = 1200


@dataclass(slots=True)
class Run:
    """Everything one demo found out. Owned by the demo."""

    nodes: list[str]
    turns: list[Turn] = field(default_factory=list)
    figures: Figures = field(default_factory=Figures)
    hit_rate: dict[str, float] = field(default_factory=dict)
    first_answer_s: float = 0.0
    memory: dict[str, list[int]] = field(default_factory=dict)  # resident bytes by kind

    @property
    def errors(self) -> list[str]:
        """Every failed request."""
        asked = [answer for turn in self.turns for answer in (turn.answer, turn.cold)]
        return [answer.error for answer in asked if answer.error] + self.figures.errors

    @property
    def tokens_equal(self) -> bool:
        """Whether every answer with reuse was the cold one."""
        return self.figures.tokens_equal and all(turn.equal for turn in self.turns)

    @property
    def requests(self) -> int:
        """Requests sent."""
        return 2 * len(self.turns) + self.figures.requests


async def run_demo(
    router_url: str,
    index: PrefixIndex,
    registry: WorkerRegistry,
    console: Console,
    started: float,
) -> Run:
    """Talk to the fleet behind ``router_url``, then measure it. ``started`` is when the demo was
    called, in monotonic seconds.

    Raises:
        ConfigError: the fleet has too few nodes, or does not share as it should.
    """
    fleet = await DemoFleet.find(router_url, index, registry)
    run = Run(nodes=[seat.node for seat in fleet.seats])
    try:
        with _bar(console, "conversation about a document", 2 * 2 * len(QUESTIONS)) as step:

            def first_step() -> None:
                run.first_answer_s = run.first_answer_s or time.monotonic() - started
                step()

            run.turns = await converse(fleet, excerpts(1, DOCUMENT_TOKENS)[0], first_step)
        run.hit_rate = (await fleet.router_status())["hit_rate"]
        prompts = excerpts(PROMPTS + 1, PROMPT_TOKENS)[1:]  # the conversation had the first
        with _bar(console, "cold, pulled and local", PROMPTS * (1 + len(LINKS))) as step:
            await measure(fleet, prompts, run.figures, step)
    finally:
        await fleet.close()
    return run


def report(run: Run) -> dict[str, Any]:
    """The figures as one JSON object: medians over the prompts, seconds and bytes a prompt."""
    figures = run.figures
    outcomes = [outcome for link in LINKS for outcome in figures.outcomes[link]]
    return {
        "nodes": len(run.nodes),
        "requests": run.requests,
        "tokens_equal": run.tokens_equal,
        "client_errors": len(run.errors),
        "ttft_recompute_s": median(figures.recompute_s),
        "ttft_pulled_s": median([s for link in LINKS for s in figures.pulled_s[link]]),
        "ttft_local_s": median(figures.local_s),
        "pulled_blocks": sum(outcome.pulled_blocks for outcome in outcomes),
        "pulled_bytes": sum(outcome.pulled_bytes for outcome in outcomes),
        "pull_s": sum(outcome.pull_s for outcome in outcomes),
        "links": {link: _link(figures, link) for link in LINKS},
        "link": figures.auto_link,
        "hit_rate": {key: run.hit_rate.get(key, 0.0) for key in ("mean", "p50", "p90", "p99")},
        "first_answer_s": run.first_answer_s,
        "resident_mib": {k: [size >> 20 for size in v] for k, v in run.memory.items()},
    }


def show(run: Run, console: Console) -> None:
    """The table of the conversation and the summary, in words."""
    console.print(_table(run.turns))
    figures = report(run)
    cold, pulled, local = (figures[f"ttft_{k}_s"] for k in ("recompute", "pulled", "local"))
    console.print(
        f"{PROMPTS} prompts of about {PROMPT_TOKENS} tokens, median time to first token: computed "
        f"cold {cold:.3f} s, pulled from the other node {pulled:.3f} s, found at home {local:.3f} s"
    )
    for link, values in figures["links"].items():
        console.print(
            f"  {link} ({values['lanes']}): {values['ttft_pulled_s']:.3f} s, "
            f"{values['bytes_per_s'] / 1e6:.0f} MB/s"
        )
    console.print(f"link that `auto` takes here: {figures['link'] or 'none'}")
    console.print(
        "hit rate of the conversation: "
        + ", ".join(f"{key} {value:.2f}" for key, value in figures["hit_rate"].items())
        + " (P90, P99: what nine tenths, 99 of 100 reach at least)"
    )
    console.print(f"first answer {run.first_answer_s:.0f} s after the start")
    for kind, sizes in figures["resident_mib"].items():
        console.print(f"  {kind}: {' + '.join(map(str, sizes))} MiB resident")
    for problem in [*run.errors, *run.figures.different, *_different(run.turns)]:
        console.print(problem, style="red", markup=False)


def finish(run: Run) -> int:
    """Print the JSON line; 0 if every answer was right and no request failed, else 1."""
    sys.stdout.write(json.dumps(report(run)) + "\n")
    sys.stdout.flush()
    return 0 if run.tokens_equal and not run.errors else 1


def _link(figures: Figures, link: str) -> dict[str, Any]:
    outcomes = figures.outcomes[link]
    rates = [o.pulled_bytes / o.pull_s for o in outcomes if o.pull_s > 0]
    return {
        "lanes": figures.lanes.get(link, ""),
        "bytes_per_s": statistics.median(rates) if rates else 0.0,
        "ttft_pulled_s": median(figures.pulled_s[link]),
    }


def _different(turns: Sequence[Turn]) -> list[str]:
    return [
        f"user {turn.user}, turn {turn.number}: {turn.answer.text!r}, cold {turn.cold.text!r}"
        for turn in turns
        if not turn.equal
    ]


def _table(turns: Sequence[Turn]) -> Table:
    table = Table(
        "user", "node", "why", "local", "pulled", "computed", "MB", "pull s", "TTFT s", "cold s",
        title="blocks of each request's prompt, and its time to first token",
    )  # fmt: skip
    for turn in turns:
        table.add_row(
            f"{turn.user}.{turn.number}", turn.answer.header("node"), turn.why,
            *_blocks(turn), f"{turn.answer.ttft_s:.2f}", f"{turn.cold.ttft_s:.2f}",
            style=None if turn.equal else "red",
        )  # fmt: skip
    return table


def _blocks(turn: Turn) -> list[str]:
    o = turn.outcome
    if o is None:
        return ["?"] * 5
    local = o.engine_blocks + o.local_blocks
    computed = max(0, o.prompt_blocks - local - o.pulled_blocks)
    sizes = f"{o.pulled_bytes / 1e6:.1f}", f"{o.pull_s:.3f}"
    return [str(local), str(o.pulled_blocks), str(computed), *sizes]


@contextmanager
def _bar(console: Console, what: str, total: int) -> Iterator[Callable[[], None]]:
    with Progress(
        *Progress.get_default_columns(), TimeElapsedColumn(), console=console
    ) as progress:
        task = progress.add_task(what, total=total)
        yield lambda: progress.advance(task)
