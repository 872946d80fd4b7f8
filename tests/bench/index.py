"""Figures of the Redis backend of the prefix index: lookups, publishes, snapshot, bytes a block.

Run: python tests/bench/index.py [--json] [--blocks 200000] [--redis URL]
Starts the embedded server, unless a URL is given: then a fleet of a random name is left there.
The last line is one JSON object. Server and client share this machine's cores.
"""

import argparse
import asyncio
import json
import os
import random
import secrets
import statistics
import sys
import tempfile
import time
from pathlib import Path

from prefixfleet.store.chain import segment_heads
from prefixfleet.store.records import NodeRecord
from prefixfleet.store.redis_index import RedisIndex
from prefixfleet.store.redis_replies import CALL_BLOCKS
from prefixfleet.store.redis_server import RedisServer

CHAIN_BLOCKS = 1024
LENGTHS = (128, 1024)
NODES = 16
MAX_HOLDERS = 4
LOOKUPS = 500
AT_ONCE = 16


def segments(chain, start, stop):
    groups: dict[bytes, list[bytes]] = {}
    heads = segment_heads(chain)
    for position in range(start, stop):
        groups.setdefault(heads[position], []).append(chain[position])
    return groups


class Server:
    """What the server says of itself."""

    def __init__(self, index):
        self._ask = index._functions.command
        self._events = index._functions.prefix + b"events"

    async def index_bytes(self):
        """Memory in use, without the event stream, which is bounded and not by blocks."""
        memory = (await self._ask("INFO", "memory")).decode()
        used = int(memory.split("used_memory:")[1].split("\r\n")[0])
        return used - (await self._ask("MEMORY", "USAGE", self._events, "SAMPLES", 0) or 0)

    async def cpu_us(self):
        """CPU time it has used: unlike its own call statistics, not blurred by other load."""
        cpu = (await self._ask("INFO", "cpu")).decode()
        names = ("used_cpu_user_main_thread:", "used_cpu_sys_main_thread:")
        return sum(1e6 * float(cpu.split(name)[1].split("\r\n")[0]) for name in names)


async def publish(index, members, chains):
    """Every chain by one node whole, and by up to three more in part."""
    chance = random.Random(1)
    blocks, calls = 0, []
    for chain in chains:
        holders = chance.sample(members, chance.randint(1, MAX_HOLDERS))
        for i, member in enumerate(holders):
            length = chance.randint(1, len(chain)) if i else len(chain)
            for start in range(0, length, CALL_BLOCKS):
                part = segments(chain, start, min(length, start + CALL_BLOCKS))
                began = time.perf_counter()
                await index.publish(member, part)
                calls.append(time.perf_counter() - began)
            blocks += length
    return blocks, calls


async def bench_publish(index, server, num_blocks):
    chains = [
        [os.urandom(16) for _ in range(CHAIN_BLOCKS)] for _ in range(num_blocks // CHAIN_BLOCKS)
    ]
    members = [await index.join(NodeRecord(node=f"n{i}", host="h")) for i in range(NODES)]
    before = await server.index_bytes()
    cpu_us = await server.cpu_us()
    blocks, calls = await publish(index, members, chains)
    cpu_us = await server.cpu_us() - cpu_us
    grown = await server.index_bytes() - before
    return chains, {
        "published_blocks_per_s": round(blocks / sum(calls)),
        "publish_server_cpu_us_per_block": round(cpu_us / blocks, 2),
        "publish_call_p99_ms": round(1e3 * statistics.quantiles(calls, n=100)[98], 3),
        "bytes_per_block": round(grown / (len(chains) * CHAIN_BLOCKS), 1),
    }


async def bench_lookups(index, server, chains, length):
    chance = random.Random(2)

    async def one():
        chain = chance.choice(chains)[:length]
        if chance.random() < 0.5:  # half of the prompts differ from the cache after 3/4
            chain = chain[: 3 * length // 4] + [os.urandom(16) for _ in range(length // 4)]
        began = time.perf_counter()
        found = await index.match(chain)
        assert max(found.values()) >= 3 * length // 4
        return time.perf_counter() - began

    await one()
    cpu_us = await server.cpu_us()
    times = [await one() for _ in range(LOOKUPS)]
    cpu_us = await server.cpu_us() - cpu_us
    began = time.perf_counter()
    for _ in range(LOOKUPS // AT_ONCE):
        await asyncio.gather(*(one() for _ in range(AT_ONCE)))
    elapsed = time.perf_counter() - began
    return {
        f"lookup_{length}_p50_ms": round(1e3 * statistics.median(times), 3),
        f"lookup_{length}_best_ms": round(1e3 * min(times), 3),
        f"lookup_{length}_server_cpu_us": round(cpu_us / LOOKUPS, 1),
        f"lookups_{length}_per_s_{AT_ONCE}_at_once": round(LOOKUPS // AT_ONCE * AT_ONCE / elapsed),
    }


async def bench(url, num_blocks):
    index = RedisIndex(url, f"bench-{secrets.token_hex(4)}", lease_s=3600, timeout_s=30)
    try:
        await index.prepare()
        server = Server(index)
        chains, figures = await bench_publish(index, server, num_blocks)
        for length in LENGTHS:
            figures |= await bench_lookups(index, server, chains, length)
        began = time.perf_counter()
        snapshot = await index.snapshot()
        figures["snapshot_blocks_per_s"] = round(
            len(snapshot.holders) / (time.perf_counter() - began)
        )
        return {"blocks": len(snapshot.holders), "nodes": NODES} | figures
    finally:
        await index.close()


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", action="store_true", help="only the last line")
    parser.add_argument("--blocks", type=int, default=200_000)
    parser.add_argument("--redis", metavar="URL", help="a server that runs already")
    options = parser.parse_args()
    if options.redis:
        figures = asyncio.run(bench(options.redis, options.blocks))
    else:
        with (
            tempfile.TemporaryDirectory() as folder,
            RedisServer.start(Path(folder), password=secrets.token_urlsafe(16)) as server,
        ):
            figures = asyncio.run(bench(server.url, options.blocks))
    if not options.json:
        for name, value in figures.items():
            print(f"{name:32} {value}")
    print(json.dumps(figures))


if __name__ == "__main__":
    sys.exit(main())
