"""Broadcasts in the simulator: decided by what nodes run, and as long as a chain of nodes takes."""

import dataclasses
import json
import math

import pytest
from simulated_conversations import BLOCK, conversations, write_trace

from prefixfleet.router.fleet_models import LLAMA_70B, PRESETS
from prefixfleet.router.policy import choose
from prefixfleet.router.simulate import main
from prefixfleet.router.simulated_fleet import Fleet, chain_of
from prefixfleet.router.simulated_replication import HOP_S
from prefixfleet.router.simulator import PUBLISH_S, Simulation
from prefixfleet.router.traces import SharedBlocks
from prefixfleet.store.heat import HOT_NODES
from prefixfleet.store.replication import BUDGET_S, Mode

HARDWARE = dataclasses.replace(PRESETS["8xA800"][0], link_bytes_per_s=12.5e9)
OTHERS = 3
BLOCKS = 8
LATER_S = 1000.0
"""What was taken long ago does not count: the mark of free slots is at its least."""
CHAIN = chain_of(SharedBlocks(tuple(range(BLOCKS)), BLOCKS * BLOCK, BLOCK))
FLEET = Fleet(
    nodes=1 + HOT_NODES + OTHERS, blocks_per_node=1000, block_tokens=BLOCK, shape=LLAMA_70B,
    hardware=HARDWARE, policy=choose, replication=Mode.ENFORCE,
)  # fmt: skip


def hot(**changes):
    """A simulation whose first node holds a chain that as many others ask for as make it hot."""
    simulation = Simulation(dataclasses.replace(FLEET, **changes))
    source, *others = simulation._nodes
    source.store(CHAIN, simulation.view, 0.0)
    for node in others[:HOT_NODES]:
        simulation.broadcasts.leased(source, node.member.node, CHAIN, 0.0)
    return simulation


def held(simulation):
    """Blocks of the chain on each node that did not ask, but the source."""
    return [node.pool.match(CHAIN) for node in simulation._nodes[1 + HOT_NODES :]]


def test_who_did_not_ask_gets_what_is_hot_one_hop_after_the_other():
    simulation = hot()
    one_link_s = HARDWARE.link_setup_s + BLOCKS * FLEET.block_bytes / 12.5e9

    for hop in range(1, OTHERS + 1):
        arrives_s = one_link_s + hop * HOP_S
        simulation.clock.advance(arrives_s - 1e-6)
        assert held(simulation) == [BLOCKS] * (hop - 1) + [0] * (OTHERS - hop + 1)
        simulation.clock.advance(arrives_s + 1e-6)
    assert held(simulation) == [BLOCKS] * OTHERS
    simulation.clock.advance(math.inf)

    assert len(simulation.view.holders(CHAIN[-1])) == OTHERS
    assert simulation.clock.now == pytest.approx(one_link_s + OTHERS * HOP_S + PUBLISH_S)
    assert simulation.broadcasts.counters == {
        "broadcasts": 1, "refused": 0, "received": OTHERS, "received_blocks": OTHERS * BLOCKS,
    }  # fmt: skip
    simulation.check()


def test_all_links_of_the_chain_but_the_last_are_busy_meanwhile():
    simulation = hot()
    source, *_, first, second, last = simulation._nodes

    moving_s = BLOCKS * FLEET.block_bytes / 12.5e9
    assert source.sending_until == pytest.approx(HARDWARE.link_setup_s + moving_s)
    assert first.sending_until == pytest.approx(source.sending_until + HOP_S)
    assert second.sending_until == pytest.approx(first.sending_until + HOP_S)
    assert last.sending_until == 0.0


@pytest.mark.parametrize(("mode", "counted"), [(Mode.OFF, {}), (Mode.OBSERVE, {"observed": 1})])
def test_without_enforce_nothing_moves(mode, counted):
    simulation = hot(replication=mode)
    simulation.clock.advance(math.inf)

    assert held(simulation) == [0] * OTHERS
    assert simulation.broadcasts.counters == counted


def test_a_node_that_restarts_meanwhile_gets_nothing_and_holds_nobody_up():
    simulation = hot()
    simulation._nodes[-2].restart(simulation._pool, simulation.view)
    simulation.clock.advance(math.inf)

    assert held(simulation) == [BLOCKS, 0, BLOCKS]
    assert simulation.broadcasts.counters["lost"] == 1
    assert len(simulation.view.holders(CHAIN[-1])) == OTHERS - 1
    simulation.check()


def test_who_holds_it_already_takes_no_part_and_for_one_node_nothing_is_sent():
    simulation = Simulation(FLEET)
    source, *others = simulation._nodes
    for node in (source, *others[-2:]):
        node.store(CHAIN, simulation.view, 0.0)
    for node in others[:HOT_NODES]:
        simulation.broadcasts.leased(source, node.member.node, CHAIN, 0.0)
    simulation.clock.advance(math.inf)

    assert held(simulation) == [0, BLOCKS, BLOCKS]
    assert simulation.broadcasts.counters == {"refused": 2, "too_few": 1}
    simulation.check()


def test_after_its_budget_a_broadcast_is_over_and_what_came_is_kept():
    half = BLOCKS // 2
    slow = BLOCKS * FLEET.block_bytes / (2 * BUDGET_S - 1)
    simulation = hot(hardware=dataclasses.replace(HARDWARE, link_bytes_per_s=slow))
    simulation.clock.advance(math.inf)

    assert held(simulation) == [half] * OTHERS
    assert simulation.broadcasts.counters["deadline"] == OTHERS
    assert simulation.clock.now == pytest.approx(BUDGET_S + PUBLISH_S)
    simulation.check()


@pytest.mark.parametrize(("slots", "received"), [(64, 0), (1024, OTHERS)])
def test_a_full_node_has_the_room_that_it_keeps_free_and_no_more(slots, received):
    """One slot of 64, 16 of 1,024."""
    simulation = Simulation(dataclasses.replace(FLEET, blocks_per_node=slots))
    source, *others = simulation._nodes
    source.store(CHAIN, simulation.view, 0.0)
    others, full = others[:HOT_NODES], others[HOT_NODES:]
    for node in full:
        ids = tuple(range(1000, 1000 + slots))
        node.store(chain_of(SharedBlocks(ids, slots * BLOCK, BLOCK)), simulation.view, 0.0)
        node.keep_free(LATER_S, simulation.view)
        assert node.pool.free_slots == slots // 64
    for node in others:
        simulation.broadcasts.leased(source, node.member.node, CHAIN, LATER_S)
    simulation.clock.advance(math.inf)

    assert simulation.broadcasts.counters["received"] == received
    assert simulation.broadcasts.counters["refused"] == OTHERS - received
    simulation.check()


def test_modes_are_compared_on_the_command_line(tmp_path, capsys):
    path = tmp_path / "trace.jsonl"
    write_trace(path, conversations(12, 6))
    words = ["--policy", "algorithm-1", "--nodes", "8", "--bandwidth", "50", "--ttft-slo", "1000"]
    storm = ["--storm", "20", "--storm-lead", "15", "--replication", "off", "observe", "enforce"]

    assert main(["--trace", str(path), "--json", *words, *storm]) == 0

    off, observe, enforce = json.loads(capsys.readouterr().out).values()
    assert "replication" not in off
    assert observe["replication"] == {"observed": 1}
    assert observe["ttft_s"] == off["ttft_s"]
    assert enforce["replication"]["received"] == 8 - 1 - HOT_NODES
    assert enforce["pulled_share"] < off["pulled_share"]
