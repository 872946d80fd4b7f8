"""Breaks a live fleet under load, and judges it: ``make chaos SEED=n``.

Prints what goes wrong while it runs, and one JSON object as the last line. Exits with 1 if an
answer was wrong, a request hung, an error had no fault to blame, books do not balance, something
is still held or left behind, or the hit rate does not return.
"""

import argparse
import asyncio
import contextlib
import json
import statistics
import sys
from collections import Counter
from itertools import islice
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "support"))

import aiohttp
import psutil
from chaos_faults import Done, Hand, plan
from chaos_fleet import UP_S, ChaosFleet
from chaos_oracle import Oracle
from chaos_real import RealClients
from chaos_verdict import recoveries, spread
from eventually import until

RETURN_S = 90.0
RETURNED = 0.8
SETTLE_S = 75.0
"""Read leases end after at most 60 s, whatever became of their readers."""
SAMPLE_S = 2.0


class Chaos:
    """One run."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        self.fleet = ChaosFleet(options.nodes, options.routers, options.real)
        self.done: list[Done] = []
        self.samples: dict[str, list[tuple[float, int, int]]] = {}  # seconds, bytes, descriptors

    async def run(self) -> dict[str, Any]:
        report: dict[str, Any] = {"seed": self.options.seed}
        try:
            await self.fleet.open()
            self.oracle = Oracle(self.fleet.router_urls(), self.options.seed)
            async with aiohttp.ClientSession() as session, asyncio.TaskGroup() as group:
                self.real = RealClients(self.oracle, self.options.seed)
                clients = await self._start_real(session, group)
                clients += [
                    group.create_task(self.oracle.ask_for_ever(session))
                    for _ in range(self.options.clients)
                ]
                sampling = group.create_task(self._sample())
                report |= await self._phases()
                for task in (*clients, sampling):
                    task.cancel()
            report |= self._judge()
            report["books"] = await self._books()
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
        async with asyncio.timeout(UP_S):
            await until(lambda: len(self.oracle.recent) >= 50 and self.oracle.reuse > 0.3, UP_S)
        warm, self.oracle.ended[:] = self.oracle.reuse, []
        say(f"warm: {warm:.2f} of prompt blocks reused")
        began = self.oracle.now()
        await self._break_things()
        healed = self.oracle.now()
        say(f"healed; {self.oracle.counts()}")
        self.oracle.recent.clear()

        def returned() -> bool:
            return len(self.oracle.recent) >= 50 and self.oracle.reuse >= RETURNED * warm

        came_back = True
        try:
            await until(returned, RETURN_S)
        except TimeoutError:
            came_back = False
        return {
            "broken_s": round(healed - began, 1),
            "reuse_before": round(warm, 3),
            "reuse_after": round(self.oracle.reuse, 3),
            "hit_rate_returned": came_back,
            "hit_rate_returned_s": round(self.oracle.now() - healed, 1),
        }

    async def _break_things(self) -> None:
        fleet, options = self.fleet, self.options
        if options.soak:
            await asyncio.sleep(options.seconds)
            return
        hand = Hand(fleet, options.seed)
        faults = plan(options.seed, fleet.node_names, fleet.router_names)
        ends_at = self.oracle.now() + options.seconds
        async with asyncio.TaskGroup() as group:
            for fault in islice(faults, options.faults or None):
                if self.oracle.now() > ends_at:
                    return
                if options.faults or not hand.is_busy(fault):
                    group.create_task(self._do(hand, fault))
                    await asyncio.sleep(fault.pause_s)

    async def _do(self, hand: Hand, fault: Any) -> None:
        done = Done(fault, self.oracle.now())
        self.done.append(done)
        await hand.do(fault)
        done.ended_s = self.oracle.now()

    async def _sample(self) -> None:
        while True:
            for name, process in self.fleet.processes.items():
                with contextlib.suppress(psutil.Error, AssertionError):
                    seen = psutil.Process(process.pid)
                    sample = (self.oracle.now(), seen.memory_info().rss, seen.num_fds())
                    self.samples.setdefault(f"{name}/{process.lives}", []).append(sample)
            with contextlib.suppress(FileNotFoundError):  # one is gone in this moment
                segments = [path.stat().st_size for path in self.fleet.segments()]
                sample = (self.oracle.now(), sum(segments), len(segments))
                self.samples.setdefault("shared memory", []).append(sample)
            await asyncio.sleep(SAMPLE_S)

    def _judge(self) -> dict[str, Any]:
        bad = [e for e in self.oracle.ended if e.how != "ok"]
        recover, unexcused = recoveries(self.done, bad)
        return {
            "faults": len(self.done),
            "by_kind": dict(sorted(Counter(d.fault.kind for d in self.done).items())),
            "requests": len(self.oracle.ended),
            "real": self.real.report(),
            "wrong": sum(e.how == "wrong" for e in bad),
            "hung": sum(e.how == "hung" for e in bad),
            "errors": dict(Counter(e.how for e in bad)),
            "errors_without_a_fault": [f"{e.began_s:.1f} s {e.how}" for e in unexcused[:20]],
            "recover_s": spread([s for s in recover.values() if s > 0])
            | {"faults_that_clients_noticed": sum(s > 0 for s in recover.values())},
            "fault_s": spread([d.ended_s - d.began_s for d in self.done]),
            "slopes": self._slopes(),
            "details": self.oracle.details[:10],
        }

    def _slopes(self) -> dict[str, list[float]]:
        """Bytes and descriptors a minute, of lives of a minute and more, in their second half;
        of "shared memory" its bytes and segments."""
        slopes = {}
        for life, samples in self.samples.items():
            half = samples[len(samples) // 2 :]
            if len(half) >= 8 and samples[-1][0] - samples[0][0] >= 60:
                times = [s[0] / 60 for s in half]
                slopes[life] = [
                    round(statistics.linear_regression(times, [s[i] for s in half]).slope, 1)
                    for i in (1, 2)
                ]
        return slopes

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


def failures(report: dict[str, Any]) -> list[str]:
    """What must not be, in words."""
    wrong = [
        key for key in ("wrong", "hung", "errors_without_a_fault", "left_behind") if report[key]
    ]
    wrong += ["exit_codes"] if report["exit_codes"] else []
    wrong += ["tracebacks_in"] if report["tracebacks_in"] else []
    wrong += [] if report["hit_rate_returned"] else ["hit_rate_returned"]
    return wrong + ([] if report["books"]["balanced"] else ["books"])


def say(text: str) -> None:
    sys.stdout.write(f"chaos: {text}\n")
    sys.stdout.flush()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    for name, default in (
        ("seed", 1),
        ("seconds", 60),
        ("faults", 0),
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
