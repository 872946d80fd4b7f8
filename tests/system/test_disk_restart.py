"""A node daemon with a disk tier is killed at any moment: what was on disk is back, and whole."""

import asyncio
import json
import os
import random
import signal
import sys
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from eventually import until
from node_rig import SECRET, PlainEngine, fresh_chain, payload_of

from prefixfleet.store.redis_index import RedisIndex

SLOT_BYTES = 8192
SUPPORT = Path(__file__).parents[1] / "support"
START_S = 60.0


@pytest.fixture
async def index(redis_url, fleet):
    index = RedisIndex(redis_url, fleet, timeout_s=20)
    yield index
    await index.close()


@pytest.fixture
def environ(redis_url, fleet, tmp_path, tmp_path_factory):
    (tmp_path / "secret").write_bytes(SECRET)
    settings = {
        "FLEET": fleet,
        "REDIS_URL": redis_url,
        "SECRET_FILE": tmp_path / "secret",
        "NODE_NAME": "a",
        "NODE_RUNTIME_DIR": tmp_path_factory.mktemp("n"),
        "NODE_LINK": "tcp",
        "NODE_POOL_BYTES": 256 * SLOT_BYTES,
        "NODE_SSD_PATH": tmp_path / "ssd",
        "NODE_SSD_BYTES": 1024 * SLOT_BYTES,
    }
    return os.environ | {f"PREFIXFLEET_{name}": str(value) for name, value in settings.items()}


@asynccontextmanager
async def killed_at_the_end(environ):
    """A daemon in a process of its own, and an engine on it; it dies without a word."""
    process = await asyncio.create_subprocess_exec(
        sys.executable, SUPPORT / "node_process.py", env=environ, stdout=asyncio.subprocess.PIPE
    )
    try:
        async with asyncio.timeout(START_S):
            json.loads(await process.stdout.readline())
        folder = Path(environ["PREFIXFLEET_NODE_RUNTIME_DIR"])
        async with PlainEngine.connected(folder / "a.sock") as engine:
            yield engine
            process.send_signal(signal.SIGKILL)
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()


async def disk(index):
    """The disk tier as the node's record tells it; empty before there is one."""
    for member, record in await index.members():
        if member.node == "a":
            return record.stats["tiers"].get("ssd", {})
    return {}


async def written(index, blocks):
    return (await disk(index)).get("resident", 0) >= blocks


async def published(index, chain):
    return (await index.match(chain)).get("a", 0)


async def found(engine, chain, request):
    """Blocks of ``chain`` that came back; each is proved to be what was computed."""
    answer = await engine.prepare(chain, request=request)
    for block, slot in zip(chain, answer["slots"], strict=False):
        assert engine.payload(slot, block) == payload_of(block)
    await engine.ask("release", request=request)
    return answer["blocks"]


@pytest.mark.timeout(240)
async def test_what_was_on_disk_is_back_after_a_kill(index, environ):
    chains = [fresh_chain(100) for _ in range(8)]
    async with killed_at_the_end(environ) as engine:
        for chain in chains:
            await engine.put(chain)
        await until(lambda: written(index, 300))
    await until(lambda: gone(index))

    async with killed_at_the_end(environ) as engine:
        await until(lambda: written(index, 300))
        kept = (await disk(index))["resident"]
        await until(lambda: all_published(index, chains, kept))
        back = [await found(engine, chain, f"r{n}") for n, chain in enumerate(chains)]

        assert sum(back) == kept


@pytest.mark.timeout(240)
async def test_killed_at_any_moment_it_never_gives_a_torn_block(index, environ):
    """Each round kills while writes are under way, and looks at all that an earlier one left."""
    draw = random.Random(7)
    chains = []
    for number in range(4):
        async with killed_at_the_end(environ) as engine:
            for n, chain in enumerate(chains):
                await found(engine, chain, f"{number}-{n}")
            new = [fresh_chain(100) for _ in range(draw.randrange(3, 6))]
            for chain in new:
                await engine.put(chain)
            chains += new
            await asyncio.sleep(draw.uniform(0, 0.05))
    assert bucket_files(environ)


def bucket_files(environ):
    return list(Path(environ["PREFIXFLEET_NODE_SSD_PATH"]).glob("a/*/bucket-*"))


async def gone(index):
    return not [member for member, _ in await index.members() if member.node == "a"]


async def all_published(index, chains, blocks):
    return sum([await published(index, chain) for chain in chains]) == blocks
