"""Lost nodes in a simulation: others compute what they were computing; then they return."""

import dataclasses
import json

import pytest
from simulated_conversations import BLOCK, conversations, write_trace

from prefixfleet.router.fleet_models import LLAMA_70B, PRESETS
from prefixfleet.router.policy import choose
from prefixfleet.router.simulate import main
from prefixfleet.router.simulated_fleet import Fleet
from prefixfleet.router.simulator import Simulation

HARDWARE, _ = PRESETS["8xA800"]
ARRIVALS = conversations(20, 6)
MIDDLE_S = ARRIVALS[len(ARRIVALS) // 2].at_s


def fleet(**changes):
    base = Fleet(
        nodes=3, blocks_per_node=2_000, block_tokens=BLOCK, shape=LLAMA_70B, hardware=HARDWARE,
        policy=choose,
    )  # fmt: skip
    return dataclasses.replace(base, **changes)


def run(simulation):
    served = simulation.run(ARRIVALS)
    simulation.check()
    return served


def mean(served):
    return sum(s.ttft_s for s in served) / len(served)


@pytest.mark.parametrize("unbound", [False, True])
def test_who_is_away_serves_nobody_and_nothing_is_lost(unbound):
    simulation = Simulation(fleet(unbound=unbound))
    simulation.fail(0, at_s=MIDDLE_S, away_s=1e6)

    served = run(simulation)

    assert len(served) == len(ARRIVALS)
    assert not any(s.refused for s in served)
    assert any(s.node == 0 for s in served)
    assert all(s.node != 0 for s in served if s.at_s + s.ttft_s > MIDDLE_S)
    assert mean(served) > mean(run(Simulation(fleet(unbound=unbound))))


@pytest.mark.parametrize("unbound", [False, True])
def test_what_it_was_computing_is_computed_by_another(unbound):
    """Its first token comes later, and its time counts from when it arrived."""
    whole = {s.at_s: s for s in run(Simulation(fleet(unbound=unbound)))}
    hit = next(s for s in whole.values() if s.ttft_s > 0.5)
    simulation = Simulation(fleet(unbound=unbound))
    simulation.fail(hit.node, at_s=hit.at_s + hit.ttft_s - 0.01, away_s=1e6)

    again = {s.at_s: s for s in run(simulation)}[hit.at_s]

    assert again.node != hit.node
    assert again.ttft_s > hit.ttft_s


def test_who_returns_is_used_again():
    simulation = Simulation(fleet())
    simulation.fail(0, at_s=MIDDLE_S, away_s=5.0)

    served = run(simulation)

    assert any(s.node == 0 for s in served if s.at_s > MIDDLE_S + 5)
    assert simulation._nodes[0].member.epoch == 3


def test_with_nobody_left_requests_are_refused_until_one_is_back():
    simulation = Simulation(fleet(nodes=1))
    simulation.fail(0, at_s=MIDDLE_S, away_s=5.0)

    served = run(simulation)

    assert len(served) == len(ARRIVALS)
    refused = [s.at_s for s in served if s.refused]
    assert refused
    assert max(refused) < MIDDLE_S + 5
    assert not any(s.refused for s in served if s.at_s > MIDDLE_S + 5)


def test_a_lost_node_on_the_command_line(tmp_path, capsys):
    trace = tmp_path / "trace.jsonl"
    write_trace(trace, ARRIVALS)
    base = ["--trace", str(trace), "--nodes", "3", "--policy", "ours", "--json"]

    def ttft(*more):
        assert main([*base, *more]) == 0
        return json.loads(capsys.readouterr().out)["ours"]["ttft_s"]["mean"]

    assert ttft("--fail", f"0@{MIDDLE_S}+1000") > ttft()


@pytest.mark.parametrize("text", ["1@5+", "1@5+x", "1@5+-3", "1@+3"])
def test_times_away_that_are_none_are_refused(capsys, text):
    with pytest.raises(SystemExit):
        main(["--trace", "none", "--fail", text])

    assert "expected" in capsys.readouterr().err
