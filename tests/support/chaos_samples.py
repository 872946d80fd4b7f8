"""What the processes of a chaos run hold: memory, descriptors, shared memory; and what grew."""

import asyncio
import contextlib
import os
import statistics
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import psutil
from chaos_fleet import ChaosFleet

SAMPLE_S = 2.0
SHARED = "shared memory"
MORE_DESCRIPTORS = 24
"""More than this at rest than under load before the faults is a leak: a link or two each peer."""
MORE_BYTES = 128 << 20
"""Likewise of memory: the allocator keeps some of what a burst needed."""


@dataclass
class Samples:
    """Owned by the driver's loop. A life is one process, or all shared memory of the fleet."""

    fleet: ChaosFleet
    clock: Callable[[], float]
    by_life: dict[str, list[tuple[float, int, int]]] = field(default_factory=dict)

    async def take_for_ever(self) -> None:
        """Sample until cancelled."""
        while True:
            at = self.clock()
            for name, (size, count) in self.now().items():
                process = self.fleet.processes.get(name)
                life = f"{name}/{process.lives}" if process else name
                self.by_life.setdefault(life, []).append((at, size, count))
            await asyncio.sleep(SAMPLE_S)

    def now(self) -> dict[str, tuple[int, int]]:
        """Bytes and descriptors of each process; of shared memory, bytes and segments."""
        found = {}
        for name, process in self.fleet.processes.items():
            with contextlib.suppress(psutil.Error, AssertionError):
                seen = psutil.Process(process.pid)
                found[name] = (seen.memory_info().rss, descriptors_of(process.pid))
        with contextlib.suppress(FileNotFoundError):  # one is gone in this moment
            sizes = [path.stat().st_size for path in self.fleet.segments()]
            found[SHARED] = (sum(sizes), len(sizes))
        return found

    def slopes(self) -> dict[str, list[float]]:
        """Bytes and descriptors a minute, of lives of a minute and more, in their second half."""
        slopes = {}
        for life, samples in self.by_life.items():
            half = samples[len(samples) // 2 :]
            if len(half) >= 8 and samples[-1][0] - samples[0][0] >= 60:
                times = [s[0] / 60 for s in half]
                slopes[life] = [
                    round(statistics.linear_regression(times, [s[i] for s in half]).slope, 1)
                    for i in (1, 2)
                ]
        return slopes


def descriptors_of(pid: int) -> int:
    """All that a process has open but the files of a disk tier: these grow with what it stores, and
    its cap bounds them."""
    count = 0
    with contextlib.suppress(OSError):  # it has ended
        for entry in Path(f"/proc/{pid}/fd").iterdir():
            with contextlib.suppress(OSError):  # closed meanwhile
                count += not os.readlink(entry).endswith(".slots")
    return count


def leaks(before: dict[str, tuple[int, int]], rest: dict[str, tuple[int, int]]) -> list[str]:
    """What is held at ``rest``, when nobody asks any more, beyond what was under load ``before``
    anything broke; of shared memory, anything more."""
    found = []
    for name, (size, count) in rest.items():
        had_size, had_count = before.get(name, (size, count))
        spare_size, spare_count = (0, 0) if name == SHARED else (MORE_BYTES, MORE_DESCRIPTORS)
        if size > had_size + spare_size:
            found.append(f"{name}: {had_size} bytes before, {size} at rest")
        if count > had_count + spare_count:
            found.append(f"{name}: {had_count} descriptors before, {count} at rest")
    return found
