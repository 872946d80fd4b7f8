"""The demo's figures: the same prompt computed cold, pulled over each link, and found at home.

Cold is a request with a salt nobody used: same engine, same settings, same tokens, no cache. A
pull is forced by a plan as a router writes it: source, blocks, link.
"""

import statistics
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from prefixfleet.cluster.demo_ask import Answer
from prefixfleet.cluster.demo_fleet import DemoFleet, Seat
from prefixfleet.store.errors import ConfigError
from prefixfleet.store.records import Outcome, PullPlan

LINKS = ("ucx", "tcp")
PULL_BUDGET_S = 10.0


@dataclass(slots=True)
class Figures:
    """What was measured, a value a prompt. Owned by the measurement."""

    recompute_s: list[float] = field(default_factory=list)
    local_s: list[float] = field(default_factory=list)
    pulled_s: dict[str, list[float]] = field(default_factory=lambda: {n: [] for n in LINKS})
    outcomes: dict[str, list[Outcome]] = field(default_factory=lambda: {n: [] for n in LINKS})
    requests: int = 0
    errors: list[str] = field(default_factory=list)
    different: list[str] = field(default_factory=list)
    lanes: dict[str, str] = field(default_factory=dict)  # by link, what carried the bytes
    auto_link: str = ""

    @property
    def tokens_equal(self) -> bool:
        """Whether every answer with reuse was the cold answer."""
        return not self.different

    def take(self, answer: Answer) -> Answer:
        """Count one request."""
        self.requests += 1
        if answer.error:
            self.errors.append(answer.error)
        return answer

    def compare(self, what: str, cold: Answer, other: Answer) -> None:
        """Note an answer with reuse that is not the cold one."""
        if not other.error and other.text != cold.text:
            self.different.append(f"{what}: {other.text!r}, cold {cold.text!r}")


def median(values: Sequence[float]) -> float:
    """Their median; 0 for none."""
    return statistics.median(values) if values else 0.0


async def measure(
    fleet: DemoFleet, prompts: Sequence[str], figures: Figures, step: Callable[[], None]
) -> None:
    """Measure every prompt over every link; nodes change roles from prompt to prompt."""
    for number, prompt in enumerate(prompts):
        target, source = fleet.seats[number % 2], fleet.seats[(number + 1) % 2]
        cold = figures.take(await target.engine.complete(prompt, salt=f"cold-{uuid.uuid4().hex}"))
        figures.recompute_s.append(cold.ttft_s)
        step()
        for link in LINKS:
            await _measure_link(fleet, prompt, (source, target, link), cold, figures)
            step()
    await _ask_auto(fleet, prompts[0], figures)


async def _measure_link(
    fleet: DemoFleet,
    prompt: str,
    way: tuple[Seat, Seat, str],
    cold: Answer,
    figures: Figures,
) -> None:
    source, target, link = way
    salt = f"{link}-{uuid.uuid4().hex}"
    blocks = await _compute_at(fleet, source, prompt, salt, figures)
    answer, outcome = await _pull(fleet, (source, target, link), prompt, salt, blocks)
    figures.take(answer)
    if not answer.error:
        figures.outcomes[link].append(_pulled_all(outcome, link, blocks))
        figures.pulled_s[link].append(answer.ttft_s)
    figures.compare(f"pulled over {link}", cold, answer)
    figures.lanes |= (await fleet.node_status(target))["stats"]["lanes"]
    again = figures.take(await target.engine.complete(prompt, salt=salt))
    figures.local_s.append(again.ttft_s)
    figures.compare("found at home", cold, again)


async def _compute_at(
    fleet: DemoFleet, source: Seat, prompt: str, salt: str, figures: Figures
) -> int:
    """Let a node compute the prompt; the number of its full blocks, once the node keeps them."""
    before = await fleet.committed(source)
    answer = figures.take(await source.engine.complete(prompt, salt=salt))
    blocks = max(0, answer.prompt_tokens - 1) // source.block_tokens
    if not answer.error:
        await fleet.wait_committed(source, before + blocks)
    return blocks


async def _pull(
    fleet: DemoFleet, way: tuple[Seat, Seat, str], prompt: str, salt: str, blocks: int
) -> tuple[Answer, Outcome | None]:
    source, target, link = way
    plan = PullPlan(
        request=f"demo-{uuid.uuid4().hex}",
        source=source.node,
        source_epoch=source.epoch,
        blocks=blocks,
        budget_s=PULL_BUDGET_S,
        link=link,
    )
    answer = await target.engine.complete(prompt, salt=salt, plan=plan)
    return answer, await fleet.outcome(target, plan.request)


def _pulled_all(outcome: Outcome | None, link: str, blocks: int) -> Outcome:
    if outcome is None or outcome.pulled_blocks < blocks or outcome.link != link:
        raise ConfigError(
            f"demo: expected {blocks} blocks pulled over {link}, got {outcome}; "
            "see the log of the node"
        )
    return outcome


async def _ask_auto(fleet: DemoFleet, prompt: str, figures: Figures) -> None:
    """One pull whose link nobody names: what ``auto`` chooses here."""
    source, target = fleet.seats[:2]
    salt = f"auto-{uuid.uuid4().hex}"
    blocks = await _compute_at(fleet, source, prompt, salt, figures)
    answer, outcome = await _pull(fleet, (source, target, ""), prompt, salt, blocks)
    figures.take(answer)
    figures.auto_link = outcome.link if outcome else ""
