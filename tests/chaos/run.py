"""Breaks a live fleet under load, and judges it: ``make chaos SEED=n``.

Prints what goes wrong while it runs, and one JSON object as the last line. Exits with 1 if an
answer was wrong, a request hung, a client that asks as the official ones do got an error while one
of each kind was alive, an error had no fault to blame, books do not balance, something is still
held, left behind or leaked, or the hit rate does not return. See `chaos_plan` for the fault model.
"""

import argparse
import asyncio
import contextlib
import json
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "support"))

import aiohttp
from chaos_faults import Hand
from chaos_fleet import UP_S, ChaosFleet
from chaos_oracle import Oracle
from chaos_outages import outages, suffer
from chaos_plan import Done, Fault, Spared, rounds
from chaos_real import RealClients
from chaos_samples import Samples, leaks
from chaos_verdict import failures, judged, of_faults
from eventually import until

RETURN_S = 90.0
RETURNED = 0.8
SETTLE_S = 75.0
"""Read leases end after at most 60 s, whatever became of their readers."""


class Chaos:
    """One run."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        self.fleet = ChaosFleet(options.nodes, options.routers, options.real)
        self.done: list[Done] = []

    async def run(self) -> dict[str, Any]:
        report: dict[str, Any] = {"seed": self.options.seed}
        try:
            await self.fleet.open()
            self.oracle = Oracle(self.fleet.router_urls(), self.options.seed)
            self.samples = Samples(self.fleet, self.oracle.now)
            async with aiohttp.ClientSession() as session, asyncio.TaskGroup() as group:
                self.real = RealClients(self.oracle, self.options.seed)
                clients = await self._start_real(session, group)
                clients += [
                    group.create_task(self.oracle.ask_for_ever(session))
                    for _ in range(self.options.clients)
                ]
                sampling = group.create_task(self.samples.take_for_ever())
                report |= await self._phases()
                for task in (*clients, sampling):
                    task.cancel()
            report |= {"real": self.real.report(), "slopes": self.samples.slopes()}
            report["details"] = self.oracle.details[:10]
            report["books"] = await self._books()
            report["leaked"] = leaks(self.warm, self.samples.now())
        finally:
            report |= await self.fleet.close()
        return report

    async def _start_real(
        self, session: aiohttp.ClientSession, group: asyncio.TaskGroup
    ) -> list[asyncio.Task[None]]:
        """One client for each real engine, once all serve and the cold answers are known."""
        for name in self.fleet.real_names:
            await self.fleet.until_up(name)
        if self.fleet.real_names:
            await self.real.prepare(session)
            say(f"{len(self.fleet.real_names)} real engines serve")
        return [
            group.create_task(self.real.ask_for_ever(session, number))
            for number in range(len(self.fleet.real_names))
        ]

    async def _phases(self) -> dict[str, Any]:
        """Warm up, break things while one of each kind is spared, return, break all of a kind."""
        oracle = self.oracle
        await self.fleet.until_whole()  # else what comes up later would look like a leak
        await until(lambda: len(oracle.recent) >= 50 and oracle.reuse > 0.3, UP_S)
        reuse, oracle.ended[:] = oracle.reuse, []
        self.warm = self.samples.now()
        say(f"warm: {reuse:.2f} of prompt blocks reused")
        began = oracle.now()
        await self._break_things()
        healed = oracle.now()
        say(f"healed; {dict(oracle.counts())}")
        oracle.recent.clear()
        came_back = await self._returned(reuse)
        report = {
            **judged(oracle.ended),
            **of_faults(self.done, oracle.ended),
            "broken_s": round(healed - began, 1),
            "reuse_before": round(reuse, 3),
            "reuse_after": round(oracle.reuse, 3),
            "hit_rate_returned": came_back,
            "hit_rate_returned_s": round(oracle.now() - healed, 1),
            "outages": [],
        }
        for outage in () if self.options.soak else outages(self.fleet):
            report["outages"].append(await suffer(self.fleet, oracle, outage))
            say(f"{outage.name}: {report['outages'][-1]}")
        return report

    async def _returned(self, before: float) -> bool:
        oracle = self.oracle

        def returned() -> bool:
            return len(oracle.recent) >= 50 and oracle.reuse >= RETURNED * before

        try:
            await until(returned, RETURN_S)
        except TimeoutError:
            return False
        return True

    async def _break_things(self) -> None:
        options, groups = self.options, self.fleet.groups()
        if options.soak:
            await asyncio.sleep(options.seconds)
            return
        hand = Hand(self.fleet, options.seed, Spared(groups))
        ends_at = self.oracle.now() + options.seconds
        async with asyncio.TaskGroup() as group:
            for number, turn in enumerate(rounds(options.seed, groups)):
                if number == options.rounds > 0:
                    return
                hand.spared.renew(turn.spare, hand.hurt)
                for fault in map(hand.aimed, turn.faults):
                    if self.oracle.now() > ends_at:
                        return
                    if options.rounds or not hand.is_busy(fault):
                        group.create_task(self._do(hand, fault))
                        await asyncio.sleep(fault.pause_s)

    async def _do(self, hand: Hand, fault: Fault) -> None:
        done = Done(fault, self.oracle.now())
        self.done.append(done)
        await hand.do(fault)
        done.ended_s = self.oracle.now()

    async def _books(self) -> dict[str, Any]:
        """Each daemon's own proof, once nobody asks any more: conservation, and nothing held."""
        found: dict[str, Any] = {}

        async def at_rest() -> bool:
            for name in self.fleet.node_names:
                found[name] = await self.fleet.books(name)
            return all(b["ok"] and not any(b["held"].values()) for b in found.values())

        with contextlib.suppress(TimeoutError):
            await until(at_rest, SETTLE_S)
        return {"balanced": all(not any(b["held"].values()) and b["ok"] for b in found.values()),
                **found}  # fmt: skip


def say(text: str) -> None:
    sys.stdout.write(f"chaos: {text}\n")
    sys.stdout.flush()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    for name, default in (
        ("seed", 1),
        ("seconds", 60),
        ("rounds", 0),
        ("nodes", 4),
        ("routers", 2),
        ("clients", 4),
        ("real", 0),
    ):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument(
        "--soak", action="store_true", help="break nothing; see whether all is flat"
    )
    report = asyncio.run(Chaos(parser.parse_args()).run())
    report["failed"] = failures(report)
    sys.stdout.write(json.dumps(report) + "\n")
    sys.exit(1 if report["failed"] else 0)


if __name__ == "__main__":
    main()
