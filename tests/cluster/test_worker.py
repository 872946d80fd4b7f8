"""A worker and its engine: announced while it serves, started again, never left over."""

import asyncio
import contextlib
from dataclasses import replace
from pathlib import Path

import aiohttp
import node_rig
import pytest
from clocks import let_pass
from eventually import alive, until
from node_rig import PlainEngine, running_node, settings_of
from upstreams import SECRET

from prefixfleet.cluster.engine_probe import in_flight_of
from prefixfleet.cluster.settings import WorkerSettings
from prefixfleet.cluster.worker import EngineFailed, Worker
from prefixfleet.store.errors import ConfigError
from prefixfleet.store.redis_index import RedisIndex
from prefixfleet.store.registry import WorkerRegistry

STANDIN = Path(node_rig.__file__).parent / "standin"


@pytest.fixture
async def index(redis_url, fleet):
    index = RedisIndex(redis_url, fleet, lease_s=60, timeout_s=20)
    yield index
    await index.close()


@pytest.fixture
async def registry(redis_url, fleet):
    registry = WorkerRegistry(redis_url, fleet, secret=SECRET, timeout_s=20)
    yield registry
    await registry.close()


@pytest.fixture
def model(tmp_path):
    for name in ("config.json", "tokenizer.json"):
        (tmp_path / name).write_text("{}")
    return tmp_path


@pytest.fixture
async def node(index, tmp_path_factory):
    """A node whose engine has said hello."""
    settings = settings_of(tmp_path_factory.mktemp("n"))
    async with (
        running_node(index, settings) as daemon,
        PlainEngine.connected(settings.socket_path, engine="w"),
    ):
        yield daemon


@pytest.fixture
async def start(monkeypatch, model, index, registry):
    """Starts a worker with a stand-in engine that ``behaves`` as told."""
    monkeypatch.setenv("PYTHONPATH", str(STANDIN))
    tasks = []

    def start(behaves="well", **settings):
        monkeypatch.setenv("STANDIN", behaves)
        values = {"name": "w", "node": "a", "model": model, "socket_path": "/tmp/s",
                  "log_file": model / "engine.log"}  # fmt: skip
        worker = Worker(WorkerSettings(**values | settings), index, registry)
        task = asyncio.create_task(worker.run())
        tasks.append(task)
        return worker, task

    yield start
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


async def test_an_engine_that_serves_is_announced_with_what_routers_need(start, node, registry):
    worker, _ = start()

    record = await asyncio.wait_for(worker.ready, 30)
    (announced,) = await until(registry.workers)

    assert announced == record
    assert announced.identity() == node_rig.NAMESPACE
    assert (announced.block_bytes, announced.max_model_tokens) == (8192, 4096)
    assert announced.prefill_tokens_per_s > 0
    async with aiohttp.ClientSession() as session, session.get(f"{record.url}/health") as response:
        assert response.status == 200


async def test_an_adapter_that_is_loaded_while_the_engine_serves_is_announced(
    start, model, node, registry, monkeypatch
):
    monkeypatch.setattr("prefixfleet.cluster.worker_adapters.LOOK_S", 0.05)
    worker, _ = start("adapts")
    assert (await asyncio.wait_for(worker.ready, 30)).adapters == {}

    weights = model / "adapter_model.safetensors"
    weights.write_bytes(b"weights")

    async def adapters():
        return [set(record.adapters) for record in await registry.workers()]

    async def has_it():
        return await adapters() == [{"an adapter"}]

    async def has_none():
        return await adapters() == [set()]

    await until(has_it)
    weights.unlink()
    await until(has_none)
    assert worker.starts == 1


async def test_a_stopped_worker_is_withdrawn_and_its_engine_ends(start, node, registry):
    worker, task = start()
    record = await asyncio.wait_for(worker.ready, 30)
    await until(registry.workers)

    task.cancel()
    await asyncio.gather(task, return_exceptions=True)

    assert await registry.workers() == []
    async with aiohttp.ClientSession() as session:
        with pytest.raises(aiohttp.ClientConnectorError):
            await session.get(f"{record.url}/health")


async def test_an_engine_that_dies_is_withdrawn_started_again_and_serves_at_its_old_place(
    start, node, registry, monkeypatch
):
    monkeypatch.setattr("prefixfleet.cluster.worker.FIRST_PAUSE_S", 0.01)
    worker, _ = start()
    record = await asyncio.wait_for(worker.ready, 30)
    await until(registry.workers)

    async with aiohttp.ClientSession() as session:
        with contextlib.suppress(aiohttp.ClientError):
            async with session.get(f"{record.url}/die"):
                pass

    await until(lambda: worker.starts == 2)

    async def again():
        return [w.url for w in await registry.workers()] == [record.url]

    await until(again)


async def test_an_engine_that_cannot_start_is_an_error_with_the_end_of_its_log(start, node):
    worker, task = start("breaks")

    with pytest.raises(EngineFailed, match=r"(?s)ended with status 1.*no such weights"):
        await asyncio.wait_for(task, 30)
    with pytest.raises(EngineFailed):
        worker.ready.result()


async def test_what_our_connector_said_in_it_is_why_an_engine_ended(start, node):
    _, task = start("raises")

    with pytest.raises(EngineFailed, match=r"status 1; ConfigError: .*not this engine; see") as why:
        await asyncio.wait_for(task, 30)
    assert "root cause" not in str(why.value)


async def test_an_engine_that_answers_no_prompt_is_an_error_with_its_answer(start, node):
    worker, task = start("refuses")

    with pytest.raises(ConfigError, match=r"status 400 for a prompt.*no prompts today"):
        await asyncio.wait_for(task, 30)
    assert not worker.ready._log_traceback  # nor is it logged as an error that nobody asked for


@pytest.fixture
def looks_once(monkeypatch):
    """A worker looks for its engine's node, then waits for longer than it may."""
    monkeypatch.setattr("prefixfleet.cluster.worker.RENEW_S", 3_600.0)


async def test_a_worker_without_a_node_says_so_when_its_time_is_over(
    start, index, looks_once, monkeypatch
):
    looked, members = asyncio.Event(), index.members

    async def listed():
        found = await members()
        looked.set()
        return found

    monkeypatch.setattr(index, "members", listed)
    _, task = start(start_s=60)
    await asyncio.wait_for(looked.wait(), 60)
    let_pass(60)

    with pytest.raises(
        EngineFailed, match=r"within 60 s .*START_S.*no daemon of that name in the index"
    ):
        await asyncio.wait_for(task, 30)


async def test_a_worker_whose_engine_uses_another_node_says_so(
    start, index, tmp_path_factory, looks_once
):
    async with running_node(index, settings_of(tmp_path_factory.mktemp("n"))):
        worker, task = start(start_s=60)
        await until(lambda: "has not said hello" in worker._waits_for, 60)
        let_pass(60)

        with pytest.raises(
            EngineFailed, match=r"within 60 s .*START_S.*connector has not said hello"
        ):
            await asyncio.wait_for(task, 30)


async def test_a_port_in_use_is_an_error_before_the_engine_starts(start, model):
    server = await asyncio.start_server(lambda r, w: w.close(), "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    async with server:
        _, task = start(port=port)

        with pytest.raises(ConfigError, match=f"127.0.0.1:{port} cannot be used"):
            await asyncio.wait_for(task, 30)
    assert not (model / "engine.log").exists()


async def test_a_worker_that_is_stopped_while_its_engine_starts_leaves_nothing(start, model):
    _, task = start()  # without a node it never gets ready
    log = model / "engine.log"
    await until(lambda: log.exists() and "standing in" in log.read_text())
    pids = _processes_with(str(model))  # the engine and what watches over its group

    task.cancel()
    await asyncio.gather(task, return_exceptions=True)

    assert len(pids) == 2
    await until(lambda: not any(map(alive, pids)))


async def state_of(registry):
    return [worker.state for worker in await registry.workers()]


async def test_a_worker_takes_no_new_requests_while_the_operator_says_so(start, node, registry):
    worker, _ = start()
    await asyncio.wait_for(worker.ready, 30)

    for names, state in ((("w",), "draining"), ((), "ready"), (("other", "a"), "draining")):
        wished = names

        await registry.change_wish(lambda wish, names=wished: replace(wish, draining=names))

        await until(lambda state=state: is_state(registry, state))


async def is_state(registry, state):
    return await state_of(registry) == [state]


async def test_a_draining_worker_waits_for_the_requests_it_has(start, node, registry):
    worker, _ = start(drain_s=60)
    record = await asyncio.wait_for(worker.ready, 30)
    async with aiohttp.ClientSession() as session:
        held = asyncio.create_task(_status(session, f"{record.url}/hold"))
        await until(lambda: _holds(session, record))

        draining = asyncio.create_task(worker.drain())
        await until(lambda: is_state(registry, "leaving"))
        assert not draining.done()
        await _status(session, f"{record.url}/let-go")

        assert await asyncio.wait_for(draining, 30) is True
        assert await held == 200


async def _status(session, url):
    async with session.get(url) as response:
        return response.status


async def _holds(session, record):
    async with session.get(f"{record.url}/metrics") as response:
        return 'running{engine="0"} 1.0' in await response.text()


async def test_draining_ends_with_its_time_and_says_so(start, node, caplog):
    worker, _ = start(drain_s=0.5)
    record = await asyncio.wait_for(worker.ready, 30)
    async with aiohttp.ClientSession() as session:
        held = asyncio.create_task(_status(session, f"{record.url}/hold"))
        await until(lambda: _holds(session, record))

        assert await worker.drain() is False

        await _status(session, f"{record.url}/let-go")
        await held
    assert "not drained: it still had requests after 0.5 s" in caplog.text


async def test_a_worker_that_serves_nothing_is_drained(start):
    worker, _ = start()  # without a node it never gets ready

    assert await worker.drain() is True


@pytest.mark.parametrize("text", ["", "vllm:num_requests_running 1.0\n", "{", "a b c d\n"])
def test_an_engine_that_does_not_say_what_it_has_is_an_error(text):
    with pytest.raises(ConfigError, match="expected gauges vllm:num_requests_running"):
        in_flight_of(text)


def test_requests_in_flight_are_those_of_all_its_cores():
    text = "".join(
        f'vllm:num_requests_{what}{{engine="{core}"}} {count}\n'
        for what, core, count in (("running", 0, 2.0), ("running", 1, 1.0), ("waiting", 0, 4.0))
    )
    assert in_flight_of(text) == 7


def _processes_with(argument):
    """Numbers of the processes whose command line contains the text."""
    found = []
    for process in Path("/proc").iterdir():
        with contextlib.suppress(OSError):
            if process.name.isdigit() and argument.encode() in (process / "cmdline").read_bytes():
                found.append(int(process.name))
    return found
