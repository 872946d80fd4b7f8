"""What a full disk finds and writes by what it takes: only what was asked for again, or all.

Run: python tests/bench/disk_admission.py [--json] [TRACE ...] [--memory 5860] [--disk 20000]

Requests go through a node's pool (production's, by ``--order``) over a disk of so many blocks that
evicts the least recently used; writes take no time, so only what is found and written is told,
not what writes cost reads. By default the trace is ``conversation_trace.jsonl.gz`` in the folder
``$TRACES_DIR``. What is found is of the second half of the requests, in memory or on disk, over
blocks asked for. The last line is one JSON object, of the first trace: ``found_reused``,
``found_all``, and ``writes_over_reused`` = blocks written by ``all`` over those by ``reused``.
"""

import argparse
import json
import sys
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "support"))

from eviction_replay import ORDERS, serve
from traces import CONVERSATION, Request, read_requests

from prefixfleet.router.arguments import count
from prefixfleet.store.chain import BlockHash
from prefixfleet.store.errors import ConfigError
from prefixfleet.store.holds import Victims
from prefixfleet.store.pool import SlotPool

ADMISSIONS = ("reused", "all")


@dataclass
class Disk:
    """Blocks by their last use, ends of chains first; ``takes_all`` as the setting says."""

    blocks: int
    takes_all: bool
    held: OrderedDict[BlockHash, None] = field(default_factory=OrderedDict)
    parents: dict[BlockHash, BlockHash] = field(default_factory=dict)
    writes: int = 0

    def take(self, victims: Victims) -> None:
        """What leaves memory: what is worth it is written, with what lies before it."""
        full = len(self.held) >= self.blocks
        for block, uses in zip(victims.hashes, victims.uses, strict=True):
            if not full or uses or self.takes_all:
                for above in self._missing(block):
                    self._write(above)

    def use(self, chain: Sequence[BlockHash]) -> None:
        """A request came for these: its end is the first of them to go."""
        for block in reversed(chain):
            if block in self.held:
                self.held.move_to_end(block)

    def _missing(self, block: BlockHash) -> list[BlockHash]:
        missing = []
        while block and block not in self.held:
            missing.append(block)
            block = self.parents[block]
        return missing

    def _write(self, block: BlockHash) -> None:
        self.held[block] = None
        self.writes += 1
        if len(self.held) > self.blocks:
            self.held.popitem(last=False)


def replay(requests: list[Request], order: str, memory: int, disk: Disk) -> float:
    """Blocks found over blocks asked for, in the second half."""
    now, found, asked = 0.0, 0, 0
    pool = SlotPool(memory, ORDERS[order](memory), lambda: now)
    for number, request in enumerate(requests):
        now = request.at_s
        disk.parents |= {block: above for above, block in pairwise((b"", *request.chain))}
        hits = found_by(pool, disk, request.chain)
        if number >= len(requests) // 2:
            found, asked = found + hits, asked + len(request.chain)
    return found / asked


def found_by(pool: SlotPool, disk: Disk, chain: Sequence[BlockHash]) -> int:
    """One request at a node; how many of its leading blocks were in memory or on disk."""
    found = pool.match(chain)
    while found < len(chain) and chain[found] in disk.held:
        found += 1
    disk.use(chain[:found])
    serve(pool, chain, disk.take)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("traces", nargs="*", type=Path, help="by default the conversation trace")
    parser.add_argument("--json", action="store_true", help="only the last line")
    parser.add_argument("--order", choices=sorted(ORDERS), default="value", help="of the memory")
    parser.add_argument("--memory", type=count(1 << 24), default=5_860, help="blocks")
    parser.add_argument("--disk", type=count(1 << 24), default=20_000, help="blocks")
    options = parser.parse_args()
    figures: dict[str, float] = {}
    for trace in options.traces or [CONVERSATION]:
        try:
            requests = read_requests(trace)
        except (ConfigError, OSError) as error:
            parser.error(f"{trace}: {error}")
        disks = {name: Disk(options.disk, name == "all") for name in ADMISSIONS}
        found = {
            name: round(replay(requests, options.order, options.memory, disk), 4)
            for name, disk in disks.items()
        }
        more = round(disks["all"].writes / max(1, disks["reused"].writes), 2)
        told = {f"found_{name}": rate for name, rate in found.items()}
        figures = figures or told | {"writes_over_reused": more}
        if not options.json:
            print(trace.name, told, f"writes of all over those of reused: {more}")
    print(json.dumps(figures))


if __name__ == "__main__":
    main()
