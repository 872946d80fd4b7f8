"""A whole fleet as a user starts it: `prefixfleet up`, the OpenAI client, `status`, `down`."""

import json
import os
import subprocess
import sys
import threading
import uuid
from pathlib import Path

import openai
import pytest
from engines import wait_until
from run_processes import kill_those_named

from prefixfleet.cluster.leftovers import pools_of, processes_of
from prefixfleet.cluster.run_state import StateHome

pytestmark = [pytest.mark.engine, pytest.mark.timeout(900)]

WHOLE_S = 600.0  # an engine may have to start
TTFT_WITHIN = 3.0
"""A factor between simulated and live: other processes may slow the live run down for a while."""
DOCUMENT = (Path(__file__).parents[2] / "README.md").read_text()[:5000]


@pytest.fixture(scope="module")
def environ(tmp_path_factory):
    state = tmp_path_factory.mktemp("state")
    name = f"test-{uuid.uuid4().hex[:8]}"
    return os.environ | {"XDG_STATE_HOME": str(state), "PREFIXFLEET_FLEET": name}


@pytest.fixture(scope="module")
def fleet(environ):
    """A fleet of two, and what was written down about it."""
    up = prefixfleet(environ, "up", "--nodes", "2", "--port", "0", "--detach")
    assert up.returncode == 0, up.stderr
    home = StateHome(Path(environ["XDG_STATE_HOME"]) / "prefixfleet")
    state = home.fleet(environ["PREFIXFLEET_FLEET"]).read()
    assert up.stdout.strip() == f"{state.endpoint}/v1"
    yield state
    down = prefixfleet(environ, "down")
    assert down.returncode == 0, down.stderr
    assert processes_of(state.run) == []
    assert not Path(state.runtime_dir).exists()
    assert pools_of(Path(state.runtime_dir)) == []


def prefixfleet(environ, *arguments):
    command = [sys.executable, "-m", "prefixfleet.cluster", *arguments]
    return subprocess.run(command, env=environ, capture_output=True, text=True, timeout=800)


@pytest.fixture
def client(fleet):
    with openai.OpenAI(base_url=f"{fleet.endpoint}/v1", api_key="none", timeout=300) as client:
        yield client


def ask(client, question, **options):
    messages = [
        {"role": "system", "content": DOCUMENT},
        {"role": "user", "content": question},
    ]
    raw = client.chat.completions.with_raw_response.create(
        model=client.models.list().data[0].id, messages=messages, max_tokens=8, temperature=0.0,
        **options,
    )  # fmt: skip
    return raw.headers, raw.parse()


def test_the_openai_client_works_unchanged_and_reuse_changes_no_answer(client):
    _, cold = ask(client, "What is it?", extra_body={"cache_salt": uuid.uuid4().hex})
    answers = [cold.choices[0].message.content]

    def found():  # a worker of which less is known may be tried once
        headers, again = ask(client, "What is it?")
        answers.append(again.choices[0].message.content)
        return headers if int(headers["x-prefixfleet-hit-tokens"]) > 0 else None

    headers = wait_until(found)
    _, stream = ask(client, "What is it?", stream=True)
    streamed = "".join(c.choices[0].delta.content or "" for c in stream if c.choices)

    assert streamed
    assert set(answers) == {streamed}
    assert headers["x-prefixfleet-node"] in ("node-0", "node-1")


def test_completions_stream_and_do_not(client):
    model = client.models.list().data[0].id
    options = {"model": model, "prompt": "One, two, three,", "max_tokens": 6, "temperature": 0.0}

    whole = client.completions.create(**options).choices[0].text
    pieces = [c.choices[0].text for c in client.completions.create(stream=True, **options)]

    assert whole
    assert "".join(pieces) == whole


def test_an_unknown_model_is_a_404_in_openais_shape(client):
    with pytest.raises(openai.NotFoundError, match="nope"):
        client.chat.completions.create(model="nope", messages=[{"role": "user", "content": "x"}])


def test_status_shows_nodes_workers_and_blocks(fleet, client, environ):
    ask(client, "What is it?")

    status = wait_until(lambda: whole(environ), WHOLE_S)

    assert {node["node"] for node in status["nodes"]} == {"node-0", "node-1"}
    assert all(node["epoch"] > 0 for node in status["nodes"])
    for tier in ("dram", "gpu"):  # in memory; and by the engines' own KV events
        wait_until(lambda tier=tier: resident_blocks(environ, tier) > 0)
    table = prefixfleet(environ, "status")
    assert table.returncode == 0
    assert "node-0" in table.stdout


def whole(environ):
    """The status, if both nodes hold their leases and both engines serve."""
    shown = prefixfleet(environ, "status", "--json")
    if shown.returncode:  # the router does not answer in time
        return None
    status = json.loads(shown.stdout)
    leases = [node["lease"] for node in status["nodes"]]
    states = [worker["state"] for worker in status["workers"]]
    well = leases == ["held"] * 2 and states == ["ready"] * 2 and not status["degraded"]
    return status if well else None


def resident_blocks(environ, tier):
    """Of both nodes, as they said in their latest records, a second or two ago."""
    status = whole(environ) or {"nodes": []}
    tiers = [node["stats"]["tiers"].get(tier, {}) for node in status["nodes"]]
    return sum(of_node.get("resident", 0) for of_node in tiers)


def test_the_simulator_tells_what_this_fleet_does(fleet):
    """The same requests through both: as many tokens found, what is found saves time, and the time
    to first token is about the same: one that is ten times off fails."""
    bench = Path(__file__).parents[1] / "bench" / "simulated.py"
    sizes = ["--conversations", "6", "--turns", "3"]

    run = subprocess.run(
        [sys.executable, str(bench), "--endpoint", fleet.endpoint, *sizes],
        capture_output=True, text=True, timeout=600,
    )  # fmt: skip

    assert run.returncode == 0, run.stderr
    found = json.loads(run.stdout.splitlines()[-1])
    assert abs(found["simulated_hit_rate"] - found["live_hit_rate"]) < 0.25
    for side in ("live", "simulated"):  # medians: one request may meet a stall of the machine
        assert found[f"{side}_warm_ttft_p50_s"] < found[f"{side}_cold_ttft_p50_s"]
    for kind in ("cold", "warm"):
        ratio = found[f"simulated_{kind}_ttft_p50_s"] / found[f"live_{kind}_ttft_p50_s"]
        assert 1 / TTFT_WITHIN < ratio < TTFT_WITHIN, (kind, found)


def test_a_router_and_a_redis_that_die_are_started_again(fleet, client, environ):
    _, before = ask(client, "What is it?")
    for name in ("prefixfleet.router", "valkey"):
        assert kill_those_named(fleet.run, name)

        def answers(before=before):
            try:
                return ask(client, "What is it?")[1].choices == before.choices
            except (openai.APIError, IndexError):  # no router, or one that knows no model yet
                return False

        wait_until(answers, 120)

    wait_until(lambda: whole(environ), WHOLE_S)  # the nodes join an empty index one after the other


def test_engines_are_exchanged_one_by_one_and_no_client_notices(fleet, client, environ):
    """Also drained and given back; the model keeps its name."""
    stop, answers, errors = threading.Event(), [], []

    def keep_asking():
        while not stop.is_set():
            try:
                answers.append(ask(client, "What is it?")[1].choices[0].message.content)
            except openai.APIError as error:
                errors.append(repr(error))
            stop.wait(1.0)  # an engine that starts needs the cores too

    asking = threading.Thread(target=keep_asking)
    asking.start()
    try:
        drained = prefixfleet(environ, "drain", "engine-0", "--wait", "60")
        resumed = prefixfleet(environ, "resume", "engine-0")
        setting = "PREFIXFLEET_WORKER_MAX_MODEL_TOKENS=3072"
        updated = prefixfleet(environ, "update", "--set", setting, "--wait", "600")
    finally:
        stop.set()
        asking.join(300)

    assert (drained.returncode, resumed.returncode) == (0, 0), (drained.stderr, resumed.stderr)
    assert updated.returncode == 0, updated.stderr
    assert errors == []
    assert len(answers) > 2
    assert set(answers) == {answers[0]}
    wait_until(lambda: whole(environ), WHOLE_S)
    assert {m.max_model_len for m in client.models.list().data} == {3072}


def test_an_update_that_cannot_start_leaves_the_fleet_as_it_was(fleet, client, environ):
    setting = "PREFIXFLEET_WORKER_KV_CACHE_BYTES=5"

    updated = prefixfleet(environ, "update", "--set", setting, "--wait", "600")

    assert updated.returncode == 2
    assert "gave up" in " ".join(updated.stderr.split())
    assert "KV_CACHE_BYTES" in updated.stderr
    wait_until(lambda: whole(environ), WHOLE_S)
    assert ask(client, "What is it?")[1].choices[0].message.content


def test_up_twice_is_refused(fleet, environ):
    again = prefixfleet(environ, "up", "--port", "0", "--detach")

    assert again.returncode == 2
    assert "already up" in " ".join(again.stderr.split())
