"""Two router processes and a TensorRT-LLM engine whose events are told once: one of them polls, and
when it is killed the other one takes over."""

import signal
from contextlib import AsyncExitStack

import aiohttp
import pytest
from chats import write_model
from eventually import until
from router_process import router_process
from router_rig import Rig
from static_entries import entry, write
from trtllm_server import TrtllmServer, counted


@pytest.fixture
async def rig(tmp_path, redis_url):
    async with AsyncExitStack() as stack:
        yield Rig(write_model(tmp_path / "model"), stack, redis_url)


@pytest.mark.timeout(300)
async def test_one_of_two_routers_polls_and_the_other_takes_over_when_it_is_killed(rig, tmp_path):
    async with TrtllmServer() as server, aiohttp.ClientSession() as session:
        engine = await rig.engine("a", plain=True, probe=counted, tokenizes=False)
        told = entry(engine, engine="trtllm", events=server.events)
        workers = write(tmp_path / "workers.json", told)
        for name in ("one", "two"):
            (tmp_path / name).mkdir()

        async def events_at(url):
            """Blocks that a router knows of the engine, and what is degraded there."""
            async with session.get(f"{url}/status") as response:
                said = await response.json()
            shown = [worker["events"] for worker in said["workers"] if "events" in worker]
            return (shown[0] if shown else {}), [mode["reason"] for mode in said["degraded"]]

        async with router_process(rig, tmp_path / "one", workers_file=workers) as (first, process):

            async def first_knows():
                server.tell(server.stored(range(64)))
                return (await events_at(first))[0].get("resident")

            await until(first_knows, 120)
            async with router_process(rig, tmp_path / "two", workers_file=workers) as (second, _):

                async def second_says_so():
                    seen, modes = await events_at(second)
                    elsewhere = seen.get("followed_by_another_router") and not seen["resident"]
                    return elsewhere and not modes

                await until(second_says_so, 120)
                polled, _ = await events_at(first)
                assert (polled["gaps"], polled["followed_by_another_router"]) == (0, False)

                process.send_signal(signal.SIGKILL)

                async def second_knows():
                    server.tell(server.stored(range(64)))
                    return (await events_at(second))[0].get("resident") == 4

                await until(second_knows, 120)
