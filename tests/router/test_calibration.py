"""What a live router has learned, as the simulator's engines, links and memory."""

import asyncio
import json

import pytest
from simulated_conversations import conversations, write_trace

from prefixfleet.router.calibration import calibration, learned
from prefixfleet.router.fleet_models import calibrated, prefill_seconds
from prefixfleet.router.simulate import main
from prefixfleet.store.errors import ConfigError

LONG = "a long question about nothing in particular " * 40


NO_TIME = {"step_s": 0, "s_per_thousand": 0, "s_per_million": 0, "samples": 3}


def worker(seconds_per_thousand, samples=9, **changes):
    prefill = {
        "step_s": 0.1, "s_per_thousand": seconds_per_thousand, "s_per_million": 0.02,
        "samples": samples,
    }  # fmt: skip
    return {"block_tokens": 16, "block_bytes": 1600, "prefill": prefill} | changes


def status(*workers, stats=()):
    nodes = [{"stats": s} for s in stats]
    return json.dumps({"workers": workers, "nodes": nodes, "uptime_s": 1}).encode()


def test_the_simulated_engine_takes_what_the_median_engine_was_learned_to_take():
    never_asked = worker(99.0, samples=0)

    found = learned(status(never_asked, worker(0.9), worker(0.2), worker(0.5)))

    seconds = prefill_seconds(found.shape, found.hardware, 3_000, 1_000)
    assert seconds == pytest.approx(0.1 + 2 * 0.5 + (9 - 1) * 0.02)
    assert calibrated(found.shape, found.hardware).seconds(3_000, 1_000) == pytest.approx(seconds)
    assert found.shape.kv_bytes_per_token == 100


def test_links_and_memory_are_those_that_nodes_tell():
    def node(slots, speed):
        links = {"other": {"bytes_per_s": speed, "setup_s": 0.003}, "broken": {"bytes_per_s": 0}}
        return {"links": links, "tiers": {"dram": {"slots": slots}}}

    told = [node(100, 1e9), node(300, 3e9), node(200, 2e9)]

    found = learned(status(worker(1.0), stats=told))

    assert (found.hardware.link_bytes_per_s, found.hardware.link_setup_s) == (2e9, 0.003)
    assert found.memory_tokens == 200 * 16
    assert found.assumed == ()


def test_what_nobody_measured_is_said():
    found = learned(status(worker(1.0), stats=[{}]))

    assert found.memory_tokens is None
    assert "no link was measured" in found.assumed[0]


@pytest.mark.parametrize(
    ("answer", "what"),
    [
        (b"", "none of a router"),
        (b'{"workers": [{}], "nodes": []}', "none of a router"),
        (status(worker(-1.0)), "none of a router"),
        (status(worker(1.0, block_tokens=-16)), "none of a router"),
        (status(worker(1.0, block_bytes=-1)), "none of a router"),
        (status(worker(1.0, prefill=NO_TIME)), "takes no time"),
        (status(), "observed yet"),
        (status(worker(1.0, samples=0)), "observed yet"),
        (status(worker(1.0, block_tokens=None)), "observed yet"),
    ],
)
def test_what_is_no_status_or_says_nothing_is_refused(answer, what):
    with pytest.raises(ConfigError, match=what):
        learned(answer)


async def test_a_live_router_calibrates_a_simulation(rig, tmp_path, capsys):
    engine = await rig.engine()
    await rig.start(engine)
    asked = {"model": "tiny", "prompt": LONG, "stream": True}
    async with rig.client.post("/v1/completions", json=asked) as response:
        await response.read()
    trace = tmp_path / "trace.jsonl"
    write_trace(trace, conversations(3, 3))

    words = ["--trace", str(trace), "--policy", "ours", "--nodes", "2", "--json"]
    endpoint = f"http://127.0.0.1:{rig.runner.addresses[0][1]}"
    code = await asyncio.to_thread(main, [*words, "--calibrate", endpoint])

    out, err = capsys.readouterr()
    assert code == 0
    assert json.loads(out)["ours"]["requests"] == 9
    assert "no link was measured" in " ".join(err.split())


def test_a_router_that_is_not_there_is_named():
    with pytest.raises(ConfigError, match=r"127\.0\.0\.1:9/status does not answer"):
        calibration("http://127.0.0.1:9", "")
