"""A node daemon with a disk tier is killed at any moment: what was on disk is back, and whole."""

import asyncio
import json
import os
import random
import signal
import sys
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from pathlib import Path

import pytest
from eventually import until
from node_rig import SECRET, PlainEngine, fresh_chain, payload_of
from two_models import LARGE, POOL_BYTES, SMALL

from prefixfleet.store.redis_index import RedisIndex

SLOT_BYTES = 8192
SUPPORT = Path(__file__).parents[1] / "support"
START_S = 60.0
PATIENCE_S = 100.0  # with a busy disk


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
async def killed_at_the_end(environ, *models):
    """A daemon in a process of its own, and an engine of each model on it, in this order; it dies
    without a word."""
    process = await asyncio.create_subprocess_exec(
        sys.executable, SUPPORT / "node_process.py", env=environ, stdout=asyncio.subprocess.PIPE
    )
    try:
        async with asyncio.timeout(START_S):
            json.loads(await process.stdout.readline())
        folder = Path(environ["PREFIXFLEET_NODE_RUNTIME_DIR"])
        async with AsyncExitStack() as stack:
            engines = [
                await stack.enter_async_context(
                    PlainEngine.connected(folder / "a.sock", engine=str(number), **model)
                )
                for number, model in enumerate(models or ({},))
            ]
            yield engines if models else engines[0]
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
    """How many blocks are on disk, if so many are."""
    resident = (await disk(index)).get("resident", 0)
    return resident if resident >= blocks else 0


async def put_until_written(engine, index, blocks):
    """Chains of which so many blocks are on disk: a slow one does not take all that leave memory
    at a time."""
    chains = []
    async with asyncio.timeout(PATIENCE_S):
        while not await written(index, blocks):
            for _ in range(8):
                chains.append(fresh_chain(100))
                await engine.put(chains[-1])
            with suppress(TimeoutError):
                await until(lambda: written(index, blocks), 5)
    return chains


async def published(index, chain):
    return (await index.match(chain)).get("a", 0)


async def found(engine, chain, request, fill=7):
    """Blocks of ``chain`` that came back; each is proved to be what was computed."""
    answer = await engine.prepare(chain, request=request)
    for block, slot in zip(chain, answer["slots"], strict=False):
        right = payload_of(block, fill, engine.layout.payload_bytes)
        assert engine.payload(slot, block) == right
    await engine.ask("release", request=request)
    return answer["blocks"]


@pytest.mark.timeout(240)
async def test_what_was_on_disk_is_back_after_a_kill(index, environ):
    async with killed_at_the_end(environ) as engine:
        chains = await put_until_written(engine, index, 300)
    await until(lambda: gone(index))

    async with killed_at_the_end(environ) as engine:
        kept = await until(lambda: written(index, 300))
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


@pytest.mark.timeout(300)
async def test_killed_with_two_models_each_has_its_own_blocks_or_none(index, environ):
    """In turn the one or the other comes first; the disk is too small for what both store, so
    that files are deleted too while it is killed."""
    cap = 8 << 20
    environ |= {
        "PREFIXFLEET_NODE_POOL_BYTES": str(POOL_BYTES),
        "PREFIXFLEET_NODE_SSD_BYTES": str(cap),
    }
    draw = random.Random(3)
    chains = {0: [], 1: []}
    back = {0: 0, 1: 0}
    for number in range(6):
        order = [0, 1] if number % 2 else [1, 0]
        models = [(SMALL, LARGE)[which] for which in order]
        async with killed_at_the_end(environ, *models) as engines:
            for which, engine in zip(order, engines, strict=True):
                for n, chain in enumerate(chains[which][-20:]):
                    back[which] += await found(engine, chain, f"{number}-{n}", which)
            await until(lambda: both_have_memory(index), PATIENCE_S)
            for _ in range(draw.randrange(12, 20)):
                for which, engine in zip(order, engines, strict=True):
                    chains[which].append(fresh_chain(60))
                    await engine.put(chains[which][-1], which)
                    await found(engine, chains[which][-1], "new", which)  # worth a write
            await asyncio.sleep(draw.uniform(0, 0.05))
        await until(lambda: gone(index))
        assert sum(path.stat().st_size for path in bucket_files(environ)) <= cap
    assert all(back.values())


async def both_have_memory(index):
    for member, record in await index.members():
        if member.node == "a":
            return [kind["slabs"] > 0 for kind in record.stats["kinds"].values()] == [True] * 2
    return False


def bucket_files(environ):
    return list(Path(environ["PREFIXFLEET_NODE_SSD_PATH"]).glob("a/*/bucket-*"))


async def gone(index):
    return not [member for member, _ in await index.members() if member.node == "a"]


async def all_published(index, chains, blocks):
    return sum([await published(index, chain) for chain in chains]) == blocks
