"""What goes wrong in a chaos run: a seeded plan (pure), and the hand that does it."""

import asyncio
import contextlib
import os
import random
import signal
from collections.abc import Iterator
from dataclasses import dataclass, field

from chaos_fleet import ChaosFleet

from prefixfleet.store.errors import IndexUnavailable
from prefixfleet.store.redis_functions import RedisFunctions

KINDS = (
    "kill node", "kill engine", "kill router", "restart redis empty",
    "freeze node", "freeze engine", "freeze router", "freeze redis",
    "cut peer", "freeze peer", "slow peer", "cut redis", "freeze redis link",
    "cut http", "freeze http", "spoil pool", "drop events", "repeat event",
)  # fmt: skip
CLIENTS_NOTICE = {"kill engine", "kill router", "freeze engine", "freeze router", "cut http"}
"""Faults during which a client may be refused: its own router is gone, or every engine is."""
SLOW_BYTES_PER_S = 200_000.0
SPOILED_BYTES = 200


@dataclass(frozen=True, slots=True)
class Fault:
    """``kind`` happens to ``target`` for ``seconds``; the next fault follows ``pause_s`` later."""

    kind: str
    target: str
    seconds: float
    pause_s: float


@dataclass
class Done:
    """A fault that was done, in the run's seconds."""

    fault: Fault
    began_s: float
    ended_s: float = field(default=float("inf"))


def plan(seed: int, nodes: list[str], routers: list[str]) -> Iterator[Fault]:
    """Faults without end; the same for the same seed. Every kind comes once in each round."""
    dice = random.Random(seed)
    while True:
        kinds = list(KINDS)
        dice.shuffle(kinds)
        for kind in kinds:
            node = dice.choice(nodes)
            who = {"engine": f"e{node[1:]}", "router": dice.choice(routers), "node": node}
            thing = kind.split()[1]
            target = who.get(thing, node)
            if thing == "redis" and kind in ("cut redis", "freeze redis link"):
                target = dice.choice([node, who["router"]])
            yield Fault(kind, target, dice.uniform(0.2, 2.5), dice.uniform(0.05, 0.6))


class Hand:
    """Does faults, several at once where they do not concern the same target."""

    def __init__(self, fleet: ChaosFleet, seed: int) -> None:
        self._fleet = fleet
        self._dice = random.Random(seed + 1)
        self._locks: dict[str, asyncio.Lock] = {}

    async def do(self, fault: Fault) -> None:
        """From its beginning to its end. One at a time for each target."""
        verb = fault.kind.split()[0]
        async with self._lock_of(fault):
            match fault.kind:
                case "kill node" | "kill engine" | "kill router":
                    process = self._fleet.processes[fault.target]
                    await process.kill()
                    await asyncio.sleep(fault.seconds)
                    await process.start()
                    await self._fleet.until_up(fault.target)
                case "freeze node" | "freeze engine" | "freeze router":
                    await self._freeze(fault)
                case "restart redis empty":
                    self._fleet.restart_redis()
                case "freeze redis":
                    await self._freeze_redis(fault.seconds)
                case "spoil pool":
                    self._spoil(fault.target)
                case "drop events" | "repeat event":
                    with contextlib.suppress(IndexUnavailable):  # it was just restarted
                        await self._change_events(verb)
                case _:
                    await self._harm_link(fault)

    def is_busy(self, fault: Fault) -> bool:
        """Whether its target still suffers from another one."""
        return self._lock_of(fault).locked()

    def _lock_of(self, fault: Fault) -> asyncio.Lock:
        thing = fault.kind.split()[1]
        return self._locks.setdefault(f"{thing} {fault.target}", asyncio.Lock())

    async def _freeze(self, fault: Fault) -> None:
        process = self._fleet.processes[fault.target]
        process.send_all(signal.SIGSTOP)
        try:
            await asyncio.sleep(fault.seconds)
        finally:
            process.send_all(signal.SIGCONT)

    async def _freeze_redis(self, seconds: float) -> None:
        pid = self._fleet.redis.pid
        os.kill(pid, signal.SIGSTOP)
        try:
            await asyncio.sleep(seconds)
        finally:
            if self._fleet.redis.pid == pid:
                os.kill(pid, signal.SIGCONT)

    async def _harm_link(self, fault: Fault) -> None:
        verb, thing = fault.kind.split()[:2]
        name = f"e{fault.target[1:]}" if thing == "http" else fault.target
        proxy = self._fleet.proxies[f"{thing}:{name}"]
        if verb == "slow":
            proxy.bytes_per_s = SLOW_BYTES_PER_S
        else:
            (proxy.cut if verb == "cut" else proxy.freeze)()
        try:
            await asyncio.sleep(fault.seconds)
        finally:
            proxy.heal()

    def _spoil(self, node: str) -> None:
        """Change bytes anywhere in the pool's memory: headers, payloads, padding."""
        path = self._fleet.pool_file(node)
        if not path.exists():
            return
        size = path.stat().st_size
        with path.open("r+b") as file:
            for _ in range(SPOILED_BYTES):
                file.seek(self._dice.randrange(size))
                file.write(self._dice.randbytes(1))

    async def _change_events(self, verb: str) -> None:
        """Take some of the latest events out of the stream, or say the last one once more."""
        redis = RedisFunctions(self._fleet.redis.url, self._fleet.fleet, "registry", timeout_s=5)
        try:
            stream, meta = redis.prefix + b"events", redis.prefix + b"meta"
            entries = await redis.command("XREVRANGE", stream, "+", "-", "COUNT", 5)
            if not entries:
                return
            if verb == "drop":
                await redis.command("XDEL", stream, *(i for i, _ in entries))
                return
            generation = entries[0][0].split(b"-")[0]
            number = await redis.command("HINCRBY", meta, "events", 1)
            await redis.command("XADD", stream, b"%b-%d" % (generation, number), *entries[0][1])
        finally:
            await redis.close()
