"""The phase of a chaos run in which none of a kind is left. Nobody can serve then; what is asked of
the fleet is that every client gets a clear error in time or its answer, and that all of it returns.
"""

import asyncio
import signal
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from chaos_client import OK
from chaos_fleet import ChaosFleet
from chaos_oracle import Oracle
from chaos_verdict import judged
from eventually import until

IN_A_ROW = 20
"""So many requests that were asked after an outage and answered at once are a recovery."""
RECOVER_S = 120.0


@dataclass(frozen=True, slots=True)
class Outage:
    """All processes of one kind are killed or frozen for ``seconds``."""

    name: str
    members: Sequence[str]
    seconds: float


def outages(fleet: ChaosFleet) -> list[Outage]:
    """One after the other. Engines are away for longer than a router waits for one."""
    routers, nodes, engines = fleet.router_names, fleet.node_names, fleet.fast_names
    lone = fleet.real_names if len(fleet.real_names) == 1 else []
    return [
        Outage("kill routers", routers, 3.0),
        Outage("freeze routers", routers, 3.0),
        Outage("kill engines", [*engines, *lone], 14.0),
        Outage("freeze engines", engines, 3.0),
        Outage("kill nodes", nodes, 3.0),
        Outage("freeze nodes", nodes, 3.0),
    ]


async def suffer(fleet: ChaosFleet, oracle: Oracle, outage: Outage) -> dict[str, Any]:
    """Do it, wait until clients are served again, and report what they saw."""
    before, began = len(oracle.ended), oracle.now()
    if outage.name.startswith("kill"):
        await _kill(fleet, outage)
    else:
        await _freeze(fleet, outage)
    ended = oracle.now()
    recovered = True
    try:
        await until(_served(oracle, ended), RECOVER_S)
    except TimeoutError:
        recovered = False
    seen = oracle.ended[before:]
    longest = max((r.sent[-1].ended_s - r.sent[0].began_s for r in seen), default=0.0)
    return {
        "outage": outage.name,
        "lasted_s": round(ended - began, 1),
        **judged(seen),
        "longest_request_s": round(longest, 1),
        "recovered": recovered,
        "recovered_s": round(oracle.now() - ended, 1),
    }


def _served(oracle: Oracle, since_s: float) -> Callable[[], bool]:
    def served() -> bool:
        latest = oracle.ended[-IN_A_ROW:]
        return len(latest) == IN_A_ROW and all(
            request.plain == OK and request.sent[0].began_s >= since_s for request in latest
        )

    return served


async def _kill(fleet: ChaosFleet, outage: Outage) -> None:
    """Until they listen again."""
    processes = [fleet.processes[name] for name in outage.members]
    await asyncio.gather(*(process.kill() for process in processes))
    await asyncio.sleep(outage.seconds)
    await asyncio.gather(*(process.start() for process in processes))
    await asyncio.gather(*map(fleet.until_up, outage.members))


async def _freeze(fleet: ChaosFleet, outage: Outage) -> None:
    for name in outage.members:
        fleet.processes[name].send_all(signal.SIGSTOP)
    try:
        await asyncio.sleep(outage.seconds)
    finally:
        for name in outage.members:
            fleet.processes[name].send_all(signal.SIGCONT)
