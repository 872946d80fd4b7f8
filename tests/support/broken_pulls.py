"""Pulls whose source breaks in the middle, again and again, and what came of each.

As a program, on a host made of namespaces: broken_pulls.py KIND CONTACT COUNT. It prints "break"
and "mend" in JSON, goes on when a line comes back, and prints the trials at the end.
"""

import asyncio
import contextlib
import json
import random
import sys
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from eventually import until
from pulls import PullRig, chain, pull_source

BLOCKS = 6000
"""94 MiB: three portions of a pull, so that it can break after the first."""
BUDGET_S = 20.0
HANG_S = 30.0
"""A pull that has not ended so long after its deadline hangs."""

Step = Callable[[], Awaitable[object]]


@dataclass(frozen=True)
class Trial:
    """One pull. ``seconds`` from the break to the answer that the rest must be recomputed."""

    seconds: float
    blocks: int
    failure: str  # "hang" if it did not end, "" if it had all blocks before the break
    wrong: bool  # blocks that are not what they must be, or slots that did not come back


async def broken_pull(
    rig: PullRig, contacts: dict[str, str], hashes: Sequence[bytes], broken: Step, mended: Step
) -> Trial:
    """Pull into an empty pool; ``broken`` is awaited once some blocks are there, ``mended`` when
    the pull has ended."""
    least = random.randint(1, len(hashes) // 4)
    pulling = asyncio.create_task(rig.pull(contacts, hashes, seconds=BUDGET_S))
    match = rig.target.pool.match
    await until(lambda: match(hashes) >= least or pulling.done(), BUDGET_S + HANG_S)
    started = time.monotonic()
    await broken()
    done, _ = await asyncio.wait({pulling}, timeout=BUDGET_S + HANG_S)
    seconds = time.monotonic() - started
    await mended()
    if not done:
        pulling.cancel()
        return Trial(seconds, 0, "hang", wrong=False)
    result = pulling.result()
    wrong = await _wrong(rig, hashes, result.blocks)
    return Trial(round(seconds, 4), result.blocks, result.failure, wrong)


async def _wrong(rig: PullRig, hashes: Sequence[bytes], blocks: int) -> bool:
    """Whether anything is not as it must be, also once what was under way has come to rest."""
    try:
        await until(lambda: rig.target.pool.counts().quarantined == 0, HANG_S)
        wrong = rig.target.holds(hashes) != blocks
    except Exception:  # noqa: BLE001 - whatever it is, it is counted and the next trial goes on
        return True
    await until(lambda: rig.target.pool.counts().pinned == 0, HANG_S)
    rig.target.evict(len(hashes))
    return wrong or rig.target.pool.free_slots != rig.target.pool.num_slots


async def series(count: int, trial: Callable[[], Awaitable[Trial]]) -> list[Trial]:
    """Trials until the break came in time in ``count`` of them, three times as many at most."""
    trials: list[Trial] = []
    while sum(bool(done.failure) for done in trials) < count and len(trials) < 3 * count:
        trials.append(await trial())
    return trials


async def killed(kind: str, count: int) -> list[Trial]:
    """kill -9 of the source, a fresh one each time."""

    async def trial() -> Trial:
        async with PullRig.of(kind, slots=BLOCKS) as rig, pull_source(kind, BLOCKS) as source:
            contacts = source.told["contacts"]
            return await broken_pull(rig, contacts, chain(BLOCKS), source.kill, _nothing)

    return await series(count, trial)


async def frozen(kind: str, count: int) -> list[Trial]:
    """SIGSTOP of the source, and SIGCONT after the pull has ended."""
    async with PullRig.of(kind, slots=BLOCKS) as rig, pull_source(kind, BLOCKS) as source:
        contacts, freeze, thaw = source.told["contacts"], _step(source.freeze), _step(source.thaw)
        return await series(count, lambda: broken_pull(rig, contacts, chain(BLOCKS), freeze, thaw))


def summary(trials: Sequence[Trial]) -> dict[str, Any]:
    """Figures of a series; times are of the pulls that the break ended."""
    times = sorted(trial.seconds for trial in trials if trial.failure not in ("", "hang"))
    return {
        "trials": len(trials),
        "broken": len(times),
        "hangs": sum(trial.failure == "hang" for trial in trials),
        "wrong": sum(trial.wrong for trial in trials),
        "p50_s": times[len(times) // 2] if times else None,
        "max_s": times[-1] if times else None,
        "failures": sorted({trial.failure for trial in trials}),
    }


def _step(call: Callable[[], None]) -> Step:
    async def step() -> None:
        call()

    return step


async def _nothing() -> None:
    pass


async def _told(word: str) -> None:
    sys.stdout.write(json.dumps(word) + "\n")
    sys.stdout.flush()
    await asyncio.to_thread(sys.stdin.readline)


async def main(kind: str, contact: str, count: str) -> None:
    contacts = {contact.partition(":")[0]: contact}
    cut, heal = (lambda: _told("break")), (lambda: _told("mend"))
    async with PullRig.of(kind, slots=BLOCKS) as rig:
        trials = await series(
            int(count), lambda: broken_pull(rig, contacts, chain(BLOCKS), cut, heal)
        )
    sys.stdout.write(json.dumps([asdict(trial) for trial in trials]) + "\n")


if __name__ == "__main__":
    with contextlib.suppress(KeyboardInterrupt):
        asyncio.run(main(*sys.argv[1:]))
