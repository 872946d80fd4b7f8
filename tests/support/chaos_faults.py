"""The hand that does what a plan of a chaos run says; see `chaos_plan`."""

import asyncio
import contextlib
import os
import random
import resource
import signal
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from chaos_fleet import ChaosFleet
from chaos_plan import Fault, Spared
from skewed_clock import set_skew

from prefixfleet.store.errors import IndexUnavailable
from prefixfleet.store.redis_functions import RedisFunctions

SLOW_BYTES_PER_S = 200_000.0
SPOILED_BYTES = 200
SKEW_S = 7 * 86_400.0


class Hand:
    """Does faults, several at once where they do not concern the same thing of a member."""

    def __init__(self, fleet: ChaosFleet, seed: int, spared: Spared) -> None:
        self._fleet = fleet
        self._dice = random.Random(seed + 1)
        self._locks: dict[str, asyncio.Lock] = {}
        self._suffering: Counter[str] = Counter()
        self.spared = spared

    @property
    def hurt(self) -> set[str]:
        """Members that suffer now, or are not back yet."""
        return {member for member, faults in self._suffering.items() if faults}

    def aimed(self, fault: Fault) -> Fault:
        """The fault, at somebody who is not spared."""
        return replace(fault, member=self.spared.instead_of(fault.member))

    def is_busy(self, fault: Fault) -> bool:
        """Whether its target still suffers from another one."""
        return self._lock_of(fault).locked()

    async def do(self, fault: Fault) -> None:
        """From its beginning to its end. One at a time for each thing of a member."""
        with self._suffers(fault.member):
            async with self._lock_of(fault):
                await self._do(fault)

    async def _do(self, fault: Fault) -> None:
        verb, thing = fault.kind.split()[:2]
        match fault.kind:
            case "kill node" | "kill engine" | "kill router":
                await self._kill(fault)
            case "freeze node" | "freeze engine" | "freeze router":
                await self._freeze(fault)
            case "restart redis empty":
                self._fleet.restart_redis()
            case "freeze redis":
                await self._freeze_redis(fault.seconds)
            case "skew clock":
                await self._skew(fault)
            case "spoil pool":
                self._spoil([self._fleet.pool_file(fault.member)])
            case "spoil disk":
                self._spoil(self._fleet.disk_files(fault.member))
            case "fill disk":
                await self._fill_disk(fault)
            case "drop events" | "repeat event":
                with contextlib.suppress(IndexUnavailable):  # it was just restarted
                    await self._change_events(verb)
            case _:
                await self._harm_link(verb, thing, fault)

    @contextlib.contextmanager
    def _suffers(self, member: str) -> Iterator[None]:
        assert member not in self.spared.now.values(), member
        self._suffering[member] += 1
        try:
            yield
        finally:
            self._suffering[member] -= 1

    def _lock_of(self, fault: Fault) -> asyncio.Lock:
        # a node whose files may not grow is not started meanwhile: it could not even map memory
        thing = "node" if fault.kind == "fill disk" else fault.kind.split()[1]
        return self._locks.setdefault(f"{thing} {fault.member}", asyncio.Lock())

    def _process_of(self, fault: Fault) -> str:
        is_engine = fault.kind.split()[1] == "engine"
        return self._fleet.engine_of(fault.member) if is_engine else fault.member

    async def _kill(self, fault: Fault) -> None:
        name = self._process_of(fault)
        process = self._fleet.processes[name]
        await process.kill()
        await asyncio.sleep(fault.seconds)
        await process.start()
        await self._fleet.until_up(name)

    async def _freeze(self, fault: Fault) -> None:
        process = self._fleet.processes[self._process_of(fault)]
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

    async def _skew(self, fault: Fault) -> None:
        path = self._fleet.skew_file(fault.member)
        set_skew(path, self._dice.uniform(-SKEW_S, SKEW_S))
        try:
            await asyncio.sleep(fault.seconds)
        finally:
            set_skew(path, 0.0)

    async def _fill_disk(self, fault: Fault) -> None:
        """No file takes a byte more: neither the disk's, nor the log, nor a new one."""
        pid = self._fleet.processes[fault.member].pid
        _, most = resource.getrlimit(resource.RLIMIT_FSIZE)
        with contextlib.suppress(ProcessLookupError):  # it was just killed
            resource.prlimit(pid, resource.RLIMIT_FSIZE, (0, most))
        await asyncio.sleep(fault.seconds)
        with contextlib.suppress(ProcessLookupError):
            resource.prlimit(pid, resource.RLIMIT_FSIZE, (most, most))

    async def _harm_link(self, verb: str, thing: str, fault: Fault) -> None:
        name = self._fleet.engine_of(fault.member) if thing == "http" else fault.member
        proxy = self._fleet.proxies[f"{thing}:{name}"]
        if verb == "slow":
            proxy.bytes_per_s = SLOW_BYTES_PER_S
        else:
            (proxy.cut if verb == "cut" else proxy.freeze)()
        try:
            await asyncio.sleep(fault.seconds)
        finally:
            proxy.heal()

    def _spoil(self, paths: list[Path]) -> None:
        """Change bytes anywhere in the files: headers, tables, payloads, padding."""
        for path in paths:
            with contextlib.suppress(FileNotFoundError), path.open("r+b") as file:
                size = os.fstat(file.fileno()).st_size
                for _ in range(SPOILED_BYTES if size else 0):
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
