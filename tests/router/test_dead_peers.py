"""A connection to a host that is cut off ends by itself; one to a silent host does not."""

import sys

import netns
import pytest

pytestmark = pytest.mark.skipif(bool(netns.missing()), reason=f"namespace hosts: {netns.missing()}")

SERVER = """
import socket, time
listening = socket.create_server(("0.0.0.0", 7000))
kept = []
while True:
    kept.append(listening.accept())  # and never a word
"""
CLIENT = """
import asyncio, sys
import uvloop
from prefixfleet.router.dead_peers import watch

async def main():
    for _ in range(100):
        try:
            reader, writer = await asyncio.open_connection("10.77.0.2", 7000)
            break
        except OSError:
            await asyncio.sleep(0.1)
    watch(writer.transport)
    print("connected", flush=True)
    sys.stdin.readline()  # the other side may have been cut off meanwhile
    if sys.argv[1] == "sending":
        writer.write(b"a request")
    reading = asyncio.create_task(reader.read(1))
    ended, _ = await asyncio.wait({reading}, timeout=float(sys.argv[2]))
    print("lost" if ended and isinstance(reading.exception(), OSError) else "kept")

uvloop.run(main())
"""


@pytest.fixture
def network(tmp_path):
    with netns.Network.of(tmp_path, "router", "worker") as network:
        network["worker"].start(sys.executable, "-c", SERVER, log="server.log")
        yield network


def _wait(network, *, cut, sending, limit_s):
    """How a read that never gets an answer ends."""
    process = network["router"].talk(sys.executable, "-c", CLIENT, sending, str(limit_s))
    assert process.stdout.readline() == "connected\n"
    if cut:
        network.cut(network["worker"])
    outcome, _ = process.communicate("go\n", timeout=limit_s + 20)
    return outcome.strip()


@pytest.mark.parametrize("sending", ["sending", "waiting"])
def test_a_peer_that_is_cut_off_ends_the_connection(network, sending):
    """Whether the request was still underway, or had arrived and was being worked on."""
    assert _wait(network, cut=True, sending=sending, limit_s=30) == "lost"


def test_a_peer_that_says_nothing_for_long_keeps_it(network):
    """A long prefill is no failure."""
    assert _wait(network, cut=False, sending="sending", limit_s=8) == "kept"
