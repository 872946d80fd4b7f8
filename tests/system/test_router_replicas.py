"""Several router processes on one Redis: one is killed under load, nobody else notices."""

import asyncio
import os
import signal
from contextlib import AsyncExitStack
from pathlib import Path

import aiohttp
import pytest
from chats import write_model
from eventually import alive, until
from router_process import announced, router_process
from router_rig import Rig
from upstreams import EVENTS, for_ever, streaming

ASK = {"model": "tiny", "prompt": "hello"}


@pytest.fixture
async def rig(tmp_path, redis_url):
    async with AsyncExitStack() as stack:
        yield Rig(write_model(tmp_path / "model"), stack, redis_url)


async def serves(session, url):
    async def ready():
        try:
            async with session.post(f"{url}/v1/completions", json=ASK) as response:
                return response.status == 200
        except aiohttp.ClientError:
            return False

    await until(ready, 60)


def children_of(pid):
    """Processes whose parent is ``pid``."""
    found = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            parent = int(path.read_text().rsplit(")", 1)[1].split()[1])
        except (FileNotFoundError, ProcessLookupError):
            continue
        if parent == pid:
            found.append(int(path.parent.name))
    return found


async def test_one_of_two_routers_is_killed_under_load(rig, tmp_path):
    """Only its own streams break; the other serves on, and forgets what the dead one reserved."""
    engine = await rig.engine("a", behave=streaming(EVENTS[0], then=for_ever))
    other_engine = await rig.engine("b")
    await announced(rig, engine, other_engine)
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
    async with (
        router_process(rig, tmp_path / "one") as (doomed, process),
        router_process(rig, tmp_path / "two") as (survivor, _),
        aiohttp.ClientSession() as session,
    ):
        engine.behave = None
        for url in (doomed, survivor):
            await serves(session, url)
        hanging = streaming(EVENTS[0], then=for_ever)
        engine.behave = other_engine.behave = hanging
        streams = [
            await session.post(f"{doomed}/v1/completions", json=ASK | {"stream": True})
            for _ in range(4)
        ]
        engine.behave = other_engine.behave = None

        async def in_flight():
            async with session.get(f"{survivor}/status") as response:
                workers = (await response.json())["workers"]
            return sum(w["load"]["decoding"] + w["load"]["queued_requests"] for w in workers)

        async def load_is(count):
            return await in_flight() == count

        await until(lambda: load_is(4))
        answers, stop = [], asyncio.Event()

        async def ask_on():
            while not stop.is_set():
                async with session.post(f"{survivor}/v1/completions", json=ASK) as response:
                    answers.append(response.status)

        asking = [asyncio.create_task(ask_on()) for _ in range(4)]
        await until(lambda: len(answers) >= 10)
        process.send_signal(signal.SIGKILL)
        await process.wait()
        seen = len(answers)
        await until(lambda: len(answers) >= seen + 20)
        stop.set()
        await asyncio.gather(*asking)
        await until(lambda: load_is(0))

        assert set(answers) == {200}
        for stream in streams:
            with pytest.raises(aiohttp.ClientError):
                await stream.read()


async def test_processes_that_share_a_port_serve_and_are_replaced(rig, tmp_path):
    await announced(rig, await rig.engine())
    connector = aiohttp.TCPConnector(force_close=True)  # each request anew: spread by the kernel
    async with (
        router_process(rig, tmp_path, "--processes", "2") as (url, parent),
        aiohttp.ClientSession(connector=connector) as session,
    ):
        await serves(session, url)

        async def processes():
            async with session.get(f"{url}/metrics") as response:
                text = await response.text()
            return {
                line.split('process="')[1].split('"')[0]
                for line in text.splitlines()
                if line.startswith("prefixfleet_workers{") and 'state="ready"' in line
                if line.endswith(" 1.0")
            }

        async def both():
            return await processes() == {"0", "1"}

        await until(both)
        before = children_of(parent.pid)
        assert len(before) == 2
        os.kill(before[0], signal.SIGKILL)
        await until(lambda: not alive(before[0]))

        async def again():
            try:
                return await both()
            except aiohttp.ClientError:
                return False  # its connection was the dead one's

        await until(again, 60)
        await until(lambda: len(children_of(parent.pid)) == 2)
        await serves(session, url)
        after = children_of(parent.pid)
        assert before[1] in after
        parent.send_signal(signal.SIGTERM)
        assert await parent.wait() == 0
        assert not any(map(alive, after))


async def test_processes_end_with_their_parent(rig, tmp_path):
    await announced(rig, await rig.engine())
    async with router_process(rig, tmp_path, "--processes", "2") as (_, parent):
        children = await until(lambda: children_of(parent.pid))

        parent.send_signal(signal.SIGKILL)

        await until(lambda: not any(map(alive, children)))


async def test_a_wrong_setting_ends_all_with_its_explanation(rig, tmp_path):
    with pytest.raises(AssertionError, match="PREFIXFLEET_ROUTER_PROT"):
        async with router_process(rig, tmp_path, "--processes", "2", prot=1):
            pass
