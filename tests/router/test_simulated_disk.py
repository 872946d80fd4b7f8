"""Disks in the simulator: what leaves memory can be read again, if that is worth its time."""

import dataclasses
import json
import math

import pytest
from simulated_conversations import BLOCK, conversations, write_trace

from prefixfleet.router.fleet_models import GB, LLAMA_70B, PRESETS
from prefixfleet.router.policy import choose
from prefixfleet.router.simulate import main
from prefixfleet.router.simulated_disk import SimulatedDisk
from prefixfleet.router.simulated_fleet import Fleet, chain_of
from prefixfleet.router.simulator import Simulation

HARDWARE, _ = PRESETS["8xA800"]
CHAIN = [bytes([i]) * 16 for i in range(10)]


def fleet(**changes):
    base = Fleet(
        nodes=2, blocks_per_node=60, block_tokens=BLOCK, shape=LLAMA_70B,
        hardware=dataclasses.replace(HARDWARE, disk_bytes_per_s=6 * GB), policy=choose,
    )  # fmt: skip
    return dataclasses.replace(base, **changes)


def hits(simulated, arrivals=None):
    simulation = Simulation(simulated)
    served = simulation.run(arrivals or conversations(20, 6))
    simulation.check()
    return sum(s.local_tokens + s.pulled_tokens for s in served)


def test_a_disk_finds_what_memory_had_no_room_for():
    little, much = hits(fleet()), hits(fleet(blocks_per_node=6_000))

    with_disk = hits(fleet(disk_blocks_per_node=6_000))

    assert little < 0.9 * much
    assert with_disk > (little + much) / 2


def test_a_disk_slower_than_computing_is_not_waited_for():
    """The router learns how slow it is, and sends such requests as if nothing was held there."""
    slow = dataclasses.replace(HARDWARE, disk_bytes_per_s=GB / 100)
    arrivals = conversations(20, 6)

    def mean(simulated):
        served = Simulation(simulated).run(arrivals)
        return sum(s.ttft_s for s in served) / len(served)

    without, fast = mean(fleet()), mean(fleet(disk_blocks_per_node=6_000))
    assert fast < without
    assert mean(fleet(disk_blocks_per_node=6_000, hardware=slow)) < 1.5 * without


def test_the_index_names_what_is_in_memory_or_on_disk_and_nothing_else():
    simulation = Simulation(fleet(disk_blocks_per_node=100))
    simulation.run(conversations(20, 6))

    for node in simulation._nodes:
        in_memory = {block for block, _ in node.pool.resident()}
        named = {b for b in in_memory | set(node.disk.held()) if _named(simulation, node, b)}
        assert named == in_memory | set(node.disk.held())
        assert len(node.disk.held()) <= 100
        gone = {b for a in conversations(20, 6) for b in _chain(a)} - named
        assert gone
        assert not any(_named(simulation, node, block) for block in gone)


def _named(simulation, node, block):
    return node.member.node in simulation.view.holders(block)


def _chain(arrival):
    return chain_of(arrival.prompt)


def test_a_node_that_restarts_has_its_disk_again():
    simulation = Simulation(fleet(disk_blocks_per_node=6_000))
    simulation.fail(0, at_s=1e6)
    simulation.run(conversations(20, 6))
    node = simulation._nodes[0]

    assert node.member.epoch == 2
    assert not list(node.pool.resident())
    assert node.disk.held()
    assert all(_named(simulation, node, b) for b in node.disk.held())


def test_reads_come_one_after_the_other_and_only_those_in_time():
    disk = SimulatedDisk(blocks=8, block_s=1.0)
    assert disk.keep(CHAIN[:8][::-1]) == []

    assert disk.read(CHAIN, ready_s=0.0, until_s=3.5) == (3, 3.0)
    assert disk.read(CHAIN, ready_s=1.0, until_s=math.inf) == (8, 11.0)
    assert disk.read(CHAIN, ready_s=0.0, until_s=2.0) == (0, 0.0)


def test_what_was_read_longest_ago_leaves_the_end_of_a_chain_first():
    disk = SimulatedDisk(blocks=4, block_s=1.0)
    disk.keep(CHAIN[:4][::-1])
    disk.read(CHAIN[:4], 0.0, math.inf)

    assert disk.keep([CHAIN[8], CHAIN[9]]) == [CHAIN[3], CHAIN[2]]
    assert disk.match(CHAIN) == 2


def test_a_disk_on_the_command_line(tmp_path, capsys):
    trace = tmp_path / "trace.jsonl"
    write_trace(trace, conversations(20, 6))
    base = ["--trace", str(trace), "--nodes", "2", "--policy", "ours", "--json"]
    base += ["--memory-tokens", str(60 * BLOCK)]

    def rate(*more):
        assert main([*base, *more]) == 0
        return json.loads(capsys.readouterr().out)["ours"]["hit_rate"]

    assert rate("--disk-tokens", str(6_000 * BLOCK), "--disk-bandwidth", "6") > rate()


@pytest.mark.parametrize("words", [["--disk-tokens", "1000"], ["--disk-bandwidth", "6"]])
def test_a_disk_without_size_or_speed_is_refused(tmp_path, capsys, words):
    trace = tmp_path / "trace.jsonl"
    write_trace(trace, conversations(2, 2))

    assert main(["--trace", str(trace), *words]) == 2
    assert "expected both or neither" in capsys.readouterr().err
