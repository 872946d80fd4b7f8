"""The simulator: production placement and books on modelled engines; same seed, same run."""

import dataclasses
import json
import math
import os
import subprocess
import sys
from pathlib import Path

import pytest
from simulated_conversations import BLOCK, conversations, write_trace
from trace_forms import FORMS, write_form

from prefixfleet.router.fleet_models import (
    LLAMA_70B,
    PRESETS,
    break_even_bytes_per_s,
    calibrated,
    prefill_seconds,
)
from prefixfleet.router.peer_policies import PEERS
from prefixfleet.router.policy import choose
from prefixfleet.router.policy_choice import POLICIES
from prefixfleet.router.simulate import main
from prefixfleet.router.simulated_fleet import Fleet, chain_of
from prefixfleet.router.simulated_run import simulate, summarise
from prefixfleet.router.simulator import Simulation
from prefixfleet.router.storms import with_storms
from prefixfleet.router.traces import SharedBlocks
from prefixfleet.store.errors import ConfigError
from prefixfleet.store.namespace import DIGEST_BYTES

HARDWARE, _ = PRESETS["8xA800"]


def fleet(policy=choose, **changes):
    base = Fleet(
        nodes=4, blocks_per_node=2000, block_tokens=BLOCK, shape=LLAMA_70B, hardware=HARDWARE,
        policy=policy,
    )  # fmt: skip
    return dataclasses.replace(base, **changes)


def test_the_same_seed_gives_the_same_run():
    arrivals = conversations(20, 6)

    assert Simulation(fleet()).run(arrivals) == Simulation(fleet()).run(arrivals)


def test_the_same_seed_gives_the_same_run_in_every_process():
    """Sets of names come in another order in each process: no decision may rest on that."""
    script = (
        "from test_simulator import *; "
        "print(Simulation(fleet(nodes=9, unbound=True)).run(conversations(30, 4)))"
    )
    folders = [str(Path(__file__).parent), str(Path(__file__).parents[1] / "support")]

    runs = {
        subprocess.run(
            [sys.executable, "-c", script], check=True, capture_output=True, text=True, timeout=300,
            env=os.environ | {"PYTHONHASHSEED": seed, "PYTHONPATH": os.pathsep.join(folders)},
        ).stdout
        for seed in ("1", "2", "3")
    }  # fmt: skip

    assert len(runs) == 1


def test_block_hashes_are_spread_as_digests_are():
    """The eviction order finds a block's past by them: all in one place, it would have none."""
    prompt = SharedBlocks(tuple(range(4096)), 4096 * BLOCK, BLOCK)

    hashes = chain_of(prompt)

    assert {len(block) for block in hashes} == {DIGEST_BYTES}
    for low, high in ((0, 2), (6, 8)):
        assert len({block[low:high] for block in hashes}) > 0.9 * len(hashes)


def test_every_request_ends_and_every_book_balances():
    arrivals = conversations(20, 6)
    simulation = Simulation(fleet(blocks_per_node=64))

    served = simulation.run(arrivals)

    simulation.check()
    assert len(served) == len(arrivals)
    assert all(math.isfinite(s.ttft_s) and s.ttft_s > 0 for s in served)
    assert not simulation._book.workers()


@pytest.mark.parametrize("name", sorted(POLICIES))
def test_every_policy_serves_a_trace(name):
    figures, _ = simulate(fleet(POLICIES[name]()), conversations(10, 4))

    assert figures["refused"] == 0
    assert 0 <= figures["hit_rate"] <= 1


def test_policies_come_in_the_published_order():
    """Mooncake, FAST'25, figure 5: random > least load > cache of the worker > Algorithm 1."""
    arrivals = conversations(60, 8)
    names = ("random", "least-tokens", "local-aware", "algorithm-1")

    means = [simulate(fleet(POLICIES[n]()), arrivals)[0]["ttft_s"]["mean"] for n in names]

    assert means == sorted(means, reverse=True)


@pytest.mark.parametrize("gap_s", [8.0, 20.0, 200.0])
def test_ours_is_never_worse_than_any_other_policy(gap_s):
    """Under contention, at the edge of it, and when every request has the fleet to itself."""
    arrivals = conversations(60, 8, gap_s=gap_s)
    others = [simulate(fleet(make()), arrivals)[0] for make in PEERS.values()]

    ours, _ = simulate(fleet(unbound=True), arrivals)

    assert ours["ttft_s"]["mean"] <= min(run["ttft_s"]["mean"] for run in others) * 1.01


def test_hits_that_take_their_time_are_estimated_as_they_come():
    """As from disks: the estimate of a request that has the fleet to itself stays exact."""
    arrivals = conversations(20, 6, gap_s=500.0)
    disks = dataclasses.replace(HARDWARE, hit_bytes_per_s=2e9)

    from_memory, from_disk = (
        Simulation(fleet(hardware=hardware)).run(arrivals) for hardware in (HARDWARE, disks)
    )

    assert all(s.estimate_s == pytest.approx(s.ttft_s) for s in from_disk)
    hits = [i for i, served in enumerate(from_disk) if served.local_tokens]
    assert hits
    assert all(from_disk[i].ttft_s > from_memory[i].ttft_s for i in hits)


def test_a_slow_link_is_not_used_by_ours():
    """Below the break-even bandwidth pulling is slower than computing, unless a queue hides it."""
    bound = break_even_bytes_per_s(LLAMA_70B, HARDWARE, 0, 8192)
    slow = dataclasses.replace(HARDWARE, link_bytes_per_s=bound / 50)

    figures, _ = simulate(fleet(hardware=slow), conversations(10, 6, gap_s=500.0))

    assert figures["pulled_share"] == 0


def test_the_break_even_bandwidth_is_the_published_one():
    """FAST'25, section 2.2: 6 GB/s for 8,192 tokens on 8 x A800 at full utilisation."""
    peak = dataclasses.replace(HARDWARE, utilisation=1.0)

    assert break_even_bytes_per_s(LLAMA_70B, peak, 0, 8192) == pytest.approx(6e9, rel=0.05)


def test_a_restarted_node_costs_hits_and_nothing_else():
    arrivals = conversations(30, 8)
    whole = Simulation(fleet())
    broken = Simulation(fleet())
    for number in range(4):
        broken.fail(number, at_s=arrivals[len(arrivals) // 2].at_s)

    before = summarise(whole.run(arrivals), ttft_slo_s=30)
    after = summarise(broken.run(arrivals), ttft_slo_s=30)

    broken.check()
    assert after["requests"] == before["requests"]
    assert after["hit_rate"] < before["hit_rate"]


def test_requests_above_the_slo_are_refused_at_once():
    figures, _ = simulate(fleet(nodes=1, ttft_slo_s=1.0), conversations(40, 4, gap_s=1.0))

    assert figures["refused"] > 0
    assert figures["ttft_s"]["p99"] < 30


def test_the_routers_model_of_a_worker_is_the_engines_model():
    model = calibrated(LLAMA_70B, HARDWARE)

    for tokens, cached in ((100, 0), (8192, 4096), (120_000, 60_000)):
        real = prefill_seconds(LLAMA_70B, HARDWARE, tokens, cached)
        assert model.seconds(tokens, cached) == pytest.approx(real)


@pytest.fixture
def simulated(tmp_path, capsys):
    """Figures of the command line on a small trace."""
    path = tmp_path / "trace.jsonl"
    write_trace(path, conversations(12, 6))

    def run(*words):
        assert main(["--trace", str(path), "--json", "--nodes", "3", *words]) == 0
        return json.loads(capsys.readouterr().out)

    return run


def test_bandwidths_are_swept(simulated):
    found = simulated("--policy", "algorithm-1", "--bandwidth", "0.1", "50")

    slow, fast = found["algorithm-1, 0.1 GB/s"], found["algorithm-1, 50 GB/s"]
    assert fast["ttft_s"]["mean"] < slow["ttft_s"]["mean"]


def test_nodes_that_fail_cost_hits(simulated):
    whole = simulated("--policy", "ours")["ours"]
    broken = simulated("--policy", "ours", "--fail", "0@20", "1@20", "2@20")["ours"]

    assert broken["requests"] == whole["requests"]
    assert broken["hit_rate"] < whole["hit_rate"]


def test_a_storm_is_two_hundred_requests_about_one_new_text(simulated):
    calm, storm = (
        simulated("--policy", "ours", "--seed", "3", "--ttft-slo", "1000", *words)["ours"]
        for words in ((), ("--storm", "20"))
    )

    assert storm["requests"] == calm["requests"] + 200
    assert storm["hit_rate"] > calm["hit_rate"]


def test_not_all_wait_for_the_one_node_that_holds_what_they_share():
    """Somebody asked about the text before: beside its node the others are no worse than idle."""
    known = with_storms(conversations(1, 1), [30.0], seed=1, lead_s=25.0)
    slow = dataclasses.replace(HARDWARE, link_bytes_per_s=3e9)

    alone, shared = (
        simulate(fleet(unbound=True, nodes=nodes, hardware=slow), known)[0]["ttft_s"]
        for nodes in (1, 8)
    )

    assert shared["mean"] < alone["mean"] / 4
    assert shared["p90"] < alone["p90"] / 4


def test_storms_share_their_text_and_nothing_else():
    calm = conversations(2, 2)

    arrivals = with_storms(calm, [5.0, 6.0], seed=1)

    added = [arrival for arrival in arrivals if arrival not in calm]
    texts = {arrival.prompt.ids[: 25_600 // BLOCK] for arrival in added}
    assert len(texts) == 2
    assert len({block for a in added for block in a.prompt.ids[25_600 // BLOCK :]}) == 400 * 2
    assert not {block for a in calm for block in a.prompt.ids} & {b for t in texts for b in t}
    assert arrivals == sorted(arrivals, key=lambda a: a.at_s)
    assert arrivals == with_storms(calm, [5.0, 6.0], seed=1)


@pytest.mark.parametrize(
    ("words", "what"),
    [
        (["--nodes", "0"], "got 0, expected a whole number from 1"),
        (["--nodes", "100000000000"], "to 10000"),
        (["--memory-tokens", "0"], "got 0, expected a whole number from 1"),
        (["--memory-tokens", "1e13"], "got 1e13, expected a whole number"),
        (["--limit", "0"], "got 0, expected a whole number from 1"),
        (["--fail", "1"], "got 1, expected NODE@SECONDS"),
        (["--replication", "on"], "got on, expected one of off, observe, enforce"),
    ],
)
def test_what_makes_no_fleet_is_refused(capsys, words, what):
    with pytest.raises(SystemExit) as ended:
        main(["--trace", "none", *words])
    assert ended.value.code == 2
    assert what in " ".join(capsys.readouterr().err.split())


def test_a_node_that_is_not_there_cannot_fail(capsys):
    assert main(["--trace", "none", "--fail", "8@1"]) == 2
    assert "got node 8, expected 0 to 7" in " ".join(capsys.readouterr().err.split())


def test_memory_beyond_what_a_trace_has_changes_nothing_and_takes_nothing(simulated):
    plenty, endless = (
        simulated("--policy", "ours", "--memory-tokens", tokens)["ours"]
        for tokens in ("100000000", "1000000000000000")
    )

    assert (plenty["hit_rate"], plenty["ttft_s"]) == (endless["hit_rate"], endless["ttft_s"])


def test_a_fleet_that_would_not_fit_in_memory_is_refused():
    with pytest.raises(ConfigError, match="can be simulated"):
        fleet(nodes=1000, blocks_per_node=1_000_000)


@pytest.mark.parametrize("text", ["1", "x@1", "1@x", "1@-1"])
def test_a_failure_without_node_and_time_is_refused(text):
    with pytest.raises(SystemExit):
        main(["--trace", "none", "--fail", text])


@pytest.mark.parametrize("at_s", ["nan", "inf", "-5", "x"])
def test_a_storm_at_no_time_is_refused(at_s):
    with pytest.raises(SystemExit):
        main(["--trace", "none", "--storm", at_s])


@pytest.mark.parametrize("form", FORMS)
def test_every_form_of_trace_is_simulated(tmp_path, capsys, form):
    trace = write_form(tmp_path / "trace.jsonl", form)
    words = ["--policy", "ours", "--json", "--speed", "0.001", "--storm", "1"]

    assert main(["--trace", str(trace), *words]) == 0

    told = capsys.readouterr()
    figures = json.loads(told.out)["ours"]
    assert figures["requests"] == 12 + 200
    assert figures["hit_rate"] > 0.4
    guessed = "4 bytes of text count as a token" in " ".join(told.err.split())
    assert guessed == (form in ("chat", "completions"))


def test_blocks_of_two_sizes_in_one_trace_are_refused(tmp_path, capsys):
    path = Path(tmp_path / "log.jsonl")
    block = {"timestamp": 0, "input_length": 10, "output_length": 1, "hash_ids": [1]}
    path.write_text(json.dumps(block) + "\n" + json.dumps(block | {"chat_id": 1}) + "\n")

    assert main(["--trace", str(path)]) == 2
    assert "blocks of [16, 512] tokens" in " ".join(capsys.readouterr().err.split())
