"""Bringing one prefix to four nodes, by a broadcast and by a pull each: part of `transfer.py`.

Each node is a network namespace whose link is held to 1 Gbit/s both ways by `tc tbf`.
"""

import contextlib
import json
import statistics
import sys
import tempfile
import time
from pathlib import Path

import netns
from pulls import EPOCH

SCRIPT = Path(netns.__file__).with_name("collective_host.py")
RECEIVERS = 4
BLOCKS, BLOCK_BYTES = 64, 1 << 20
RATE = ["tbf", "rate", "1gbit", "burst", "128k", "latency", "50ms"]
LONGEST_S = 120
STALL_S = 10


class Node:
    """A node on a host of its own."""

    def __init__(self, host):
        self.name = host.name
        words = [sys.executable, SCRIPT, host.name, "enforce", host.address, "/tmp/pool"]
        self._process = host.talk(*words, str(BLOCKS), str(BLOCK_BYTES), str(STALL_S))

    def hear(self):
        return json.loads(self._process.stdout.readline())

    def tell(self, *words):
        self._process.stdin.write(json.dumps(words) + "\n")
        self._process.stdin.flush()

    def ask(self, *words):
        self.tell(*words)
        return self.hear()

    def close(self):
        self._process.communicate()


def hold(network):
    """Every host's link, both ways."""
    for host in network.hosts[1:]:
        host.run("tc", "qdisc", "add", "dev", "eth0", "root", *RATE)
        network.hosts[0].run("tc", "qdisc", "add", "dev", host.port, "root", *RATE)


def by_pulls(source, contact, others):
    source.ask("meet", [])  # so that nothing is broadcast
    started = time.perf_counter()
    for node in others:
        node.tell("pull", contact)
    assert all(node.hear()["blocks"] == BLOCKS for node in others)
    return time.perf_counter() - started


def by_broadcast(source, members, others):
    source.ask("meet", members)
    started = time.perf_counter()
    source.ask("replicate")
    for node in others:
        while node.ask("matched")["blocks"] < BLOCKS:
            assert time.perf_counter() - started < LONGEST_S, node.ask("state")
            time.sleep(0.02)
    return time.perf_counter() - started


def at_rest(nodes):
    """Leases are back and everybody could take part again."""
    for node in nodes:
        while (state := node.ask("state"))["reserved"] or not state["at_rest"]:
            time.sleep(0.05)


def measure(rounds):
    """Seconds until all have it, medians, and the median of the rounds' ratios."""
    if reason := netns.missing():
        return {"absent": reason}
    names = ["switch", "source", *(f"node{i}" for i in range(RECEIVERS))]
    with (
        tempfile.TemporaryDirectory() as folder,
        netns.Network.of(Path(folder), *names) as network,
        contextlib.ExitStack() as stack,
    ):
        hold(network)
        nodes = [Node(host) for host in network.hosts[1:]]
        for node in nodes:
            stack.callback(node.close)
        contacts = [node.hear()["contact"] for node in nodes]
        members = [(n.name, EPOCH, contact) for n, contact in zip(nodes, contacts, strict=True)]
        source, *others = nodes
        source.ask("fill")
        pulls, broadcasts = [], []
        for _ in range(rounds):
            for taken, way in (
                (pulls, lambda: by_pulls(source, contacts[0], others)),
                (broadcasts, lambda: by_broadcast(source, members, others)),
            ):
                taken.append(way())
                at_rest(nodes)
                for node in others:
                    node.ask("evict")
        ratios = [pull / cast for pull, cast in zip(pulls, broadcasts, strict=True)]
        return {
            "nodes": RECEIVERS,
            "bytes": BLOCKS * BLOCK_BYTES,
            "pulls_s": round(statistics.median(pulls), 3),
            "broadcast_s": round(statistics.median(broadcasts), 3),
            "times_as_fast": round(statistics.median(ratios), 2),
        }
