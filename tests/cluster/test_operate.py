"""``drain``, ``resume``, ``scale`` and ``update``, at a real Redis with announced workers."""

import asyncio
import threading
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
from upstreams import SECRET

from prefixfleet.cluster import __main__ as program
from prefixfleet.cluster import operate
from prefixfleet.store.records import FleetWish, WorkerRecord
from prefixfleet.store.registry import WorkerRegistry


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch, fleet):
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.setenv("PREFIXFLEET_FLEET", fleet)
    monkeypatch.delenv("PREFIXFLEET_REDIS_URL", raising=False)
    (tmp_path / "secret").write_bytes(SECRET)
    monkeypatch.setenv("PREFIXFLEET_SECRET_FILE", str(tmp_path / "secret"))


@pytest.fixture
def model(tmp_path):
    for name in ("config.json", "tokenizer.json"):
        (tmp_path / name).write_text("{}")
    return tmp_path


@pytest.fixture
def told(redis_url, fleet):
    """Calls an async function with a registry of the fleet."""

    def call(function):
        async def run():
            registry = WorkerRegistry(redis_url, fleet, secret=SECRET, timeout_s=20)
            try:
                return await function(registry)
            finally:
                await registry.close()

        return asyncio.run(run())

    return call


@pytest.fixture
def announce(told):
    def announce(*workers):
        async def run(registry):
            for name, fields in workers:
                await registry.announce(worker(name, **fields), ttl_s=600)

        told(run)

    return announce


def worker(name, **fields):
    known = {
        "node": f"node-of-{name}", "url": "http://127.0.0.1:1", "model": "m", "model_path": "/m",
        "namespace": {}, "block_bytes": 1, "max_model_tokens": 1, "prefill_tokens_per_s": 1.0,
    }  # fmt: skip
    return WorkerRecord(worker=name, **(known | fields))


@pytest.fixture
def run(redis_url, capsys):
    """Exit status and what was said."""

    def run(*words, redis=redis_url):
        with pytest.raises(SystemExit) as ended:
            program.main([*words, *(("--redis", redis) if redis else ())])
        return ended.value.code, " ".join(capsys.readouterr().err.split())

    return run


def wish_of(told):
    return told(lambda registry: registry.wish())


def test_a_drained_worker_is_written_down_and_resumed(run, announce, told):
    announce(("a", {}), ("b", {}))

    assert run("drain", "a", "node-of-b")[0] == 0
    assert wish_of(told).draining == ("a", "node-of-b")
    assert run("resume", "a")[0] == 0
    assert wish_of(told).draining == ("node-of-b",)


def test_drain_waits_until_the_worker_says_so(run, announce):
    announce(("a", {"state": "draining"}), ("b", {}))

    assert run("drain", "a", "--wait", "20")[0] == 0
    code, said = run("drain", "b", "--wait", "0.1")
    assert code == 2
    assert "not done within 0.1 s: a draining, rollout 0, b ready, rollout 0; it goes on" in said


def test_an_update_that_failed_before_does_not_fail_a_drain(run, announce, told):
    announce(("a", {"state": "draining"}), ("b", {}))
    told(lambda registry: registry.change_wish(lambda wish: replace(wish, failed="no weights")))

    assert run("drain", "a", "--wait", "20") == (0, "done")
    assert wish_of(told).failed == "no weights"


def test_an_unknown_name_is_refused_with_those_there_are(run, announce, told):
    announce(("a", {}))

    code, said = run("drain", "x")

    assert code == 2
    assert "no worker or node x; there are 127.0.0.1, a, node-of-a" in said
    assert wish_of(told) == FleetWish()


def test_scale_writes_the_number_and_waits_for_it(run, announce, told):
    announce(("a", {}), ("b", {}))

    assert run("scale", "2", "--wait", "20")[0] == 0
    assert run("scale", "3")[0] == 0
    assert wish_of(told).nodes == 3


def test_a_host_is_drained_by_its_address_which_is_forgotten_when_it_is_gone(run, announce, told):
    announce(("a", {}), ("b", {"url": "http://192.0.2.7:1"}))

    assert run("drain", "192.0.2.7")[0] == 0
    assert wish_of(told).draining == ("192.0.2.7",)
    told(lambda registry: registry.withdraw("b"))
    assert run("drain", "a")[0] == 0
    assert wish_of(told).draining == ("a",)


def test_drain_waits_for_the_requests_that_run(run, announce, engine):
    announce(("a", {"state": "draining", "url": engine.url}))

    engine.running = 2
    assert "not done within 0.1 s" in run("drain", "a", "--wait", "0.1")[1]
    engine.running = 0
    assert run("drain", "a", "--wait", "20")[0] == 0


@pytest.fixture
def engine():
    """The metrics of an engine, served over HTTP."""

    class Metrics(BaseHTTPRequestHandler):
        def do_GET(self):
            lines = [f"vllm:num_requests_running {server.running}", "vllm:num_requests_waiting 0"]
            self.send_response(200)
            self.end_headers()
            self.wfile.write("\n".join([*lines, ""]).encode())

        def log_message(self, *_):
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Metrics)
    server.url = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield server
    server.shutdown()
    thread.join()
    server.server_close()


def test_the_number_of_nodes_is_left_to_the_fleet_within_bounds(run, announce, told):
    announce(("a", {}), ("b", {}))

    assert run("scale", "--between", "3", "8", "--target", "0.5")[0] == 0
    wish = wish_of(told)
    assert (wish.nodes, wish.least, wish.most, wish.wait_s) == (3, 3, 8, 0.5)
    assert run("scale", "2")[0] == 0
    wish = wish_of(told)
    assert (wish.nodes, wish.least, wish.most, wish.wait_s) == (2, 0, 0, 0.0)


@pytest.mark.parametrize(
    "words", [(), ("3", "--between", "1", "2"), ("--between", "3", "2"), ("--target", "0")]
)
def test_wrong_bounds_are_refused(run, words):
    assert run("scale", *words)[0] == 2


@pytest.mark.parametrize("count", ["0", "65", "two"])
def test_a_wrong_number_is_refused(run, count):
    code, said = run("scale", count)

    assert code == 2
    assert "nodes" in said


def test_an_update_counts_up_and_keeps_the_name_that_clients_ask_for(run, announce, told, model):
    announce(("a", {}), ("b", {}))

    assert run("update", "--set", "PREFIXFLEET_WORKER_MAX_MODEL_TOKENS=64")[0] == 0
    assert run("update", "--model", str(model))[0] == 0

    wish = wish_of(told)
    assert wish.rollout == 2
    assert wish.environ == {
        "PREFIXFLEET_WORKER_MAX_MODEL_TOKENS": "64",
        "PREFIXFLEET_WORKER_MODEL": str(model),
        "PREFIXFLEET_WORKER_SERVED_NAME": "m",
    }
    assert wish.undo == {"PREFIXFLEET_WORKER_MAX_MODEL_TOKENS": "64"}


def test_an_update_waits_until_every_worker_has_it(run, announce):
    announce(("a", {"rollout": 1}), ("b", {"rollout": 1}))

    update = ("update", "--set", "PREFIXFLEET_WORKER_DRAIN_S=1", "--wait")
    assert run(*update, "20")[0] == 0
    code, said = run(*update, "0.1")
    assert code == 2
    assert "a ready, rollout 1" in said


def test_an_update_is_not_done_while_a_worker_is_away(run, announce, told, monkeypatch):
    """It is being exchanged just now; the others have the update already."""
    announce(("a", {"rollout": 1}), ("b", {"rollout": 0}))
    changed = WorkerRegistry.change_wish

    async def and_leave(registry, change):
        await registry.withdraw("b")
        return await changed(registry, change)

    monkeypatch.setattr(operate.WorkerRegistry, "change_wish", and_leave)

    code, said = run("update", "--set", "PREFIXFLEET_WORKER_DRAIN_S=1", "--wait", "0.1")

    assert code == 2
    assert "not done within 0.1 s" in said


def test_an_update_that_the_fleet_gave_up_is_an_error_with_its_reason(
    run, announce, told, monkeypatch
):
    announce(("a", {}), ("b", {}))
    changed = WorkerRegistry.change_wish

    async def and_fail(registry, change):
        wish = await changed(registry, change)
        await changed(registry, lambda now: replace(now, failed="replace node-0: no weights"))
        return wish

    monkeypatch.setattr(operate.WorkerRegistry, "change_wish", and_fail)
    code, said = run("update", "--set", "PREFIXFLEET_WORKER_DRAIN_S=1", "--wait", "20")

    assert code == 2
    assert "the fleet gave up: replace node-0: no weights" in said


@pytest.mark.parametrize(
    ("words", "why"),
    [
        ((), "nothing to update: give --model or --set"),
        (("--set", "NAME=1"), "expected NAME=VALUE with one of PREFIXFLEET_WORKER_SERVED_NAME"),
        (("--set", "DRAIN_S=1"), "expected NAME=VALUE with one of"),
        (("--set", "PREFIXFLEET_WORKER_NAME=x"), "expected NAME=VALUE with one of"),
        (("--set", "PREFIXFLEET_WORKER_DRAIN_S"), "expected NAME=VALUE with one of"),
        (("--set", "PREFIXFLEET_WORKER_DRAIN_S=\n"), "up to 1,000 plain characters"),
        (("--set", "PREFIXFLEET_WORKER_MODEL=/x"), "expected NAME=VALUE with one of"),
        (("--model", "/nowhere"), "expected a folder with config.json"),
    ],
)
def test_a_wrong_update_is_refused(run, announce, told, words, why):
    announce(("a", {}), ("b", {}))

    code, said = run("update", *words)

    assert code == 2
    assert why in said
    assert wish_of(told) == FleetWish()


def test_an_update_that_would_leave_nobody_is_refused_unless_that_is_wanted(run, announce):
    announce(("a", {}), ("b", {"model": "other"}))
    update = ("update", "--set", "PREFIXFLEET_WORKER_DRAIN_S=1")

    code, said = run(*update)

    assert code == 2
    assert "nobody else serves the model of a, b" in said
    assert run(*update, "--downtime")[0] == 0


def test_which_of_several_models_must_be_clear(run, announce, model):
    announce(("a", {}), ("b", {"model": "other"}))

    code, said = run("update", "--model", str(model), "--downtime")

    assert code == 2
    assert "serves ['m', 'other']: which would it replace?" in said


def test_without_workers_or_redis_it_says_what_to_set(run):
    assert "no worker of fleet" in run("scale", "2")[1]
    assert "set --redis to the fleet's Redis" in run("scale", "2", redis="redis://127.0.0.1:1/0")[1]
    code, said = run("scale", "2", redis=None)
    assert code == 2
    assert "set --redis to the Redis of another one" in said
