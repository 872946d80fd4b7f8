"""Links under every event loop that hosts us: a daemon inside Ray runs on uvloop.

uvloop makes a socket non-blocking when it watches it; asyncio does not. A thread that trusts
the socket to block then sees "nothing there" at once and takes its peer for dead.
"""

import asyncio

import pytest
import uvloop
from links import NETWORK_KINDS, Echo, Rig, read, some_bytes, soon

from prefixfleet.transfer.link import Range

MIB = 1024 * 1024
ROUNDS = 6


async def _pull_again_and_again(kind):
    segment = some_bytes(64 * MIB)
    async with Rig(kind) as rig:
        _, peer = await rig.pair(segment, Echo())
        for _ in range(ROUNDS):  # between the reads both sides wait for the next word
            assert await peer.ask(b"hello", deadline=soon())
            whole = await read(peer, [Range(i * 8 * MIB, 8 * MIB) for i in range(8)])
            assert b"".join(whole) == bytes(segment)
            rest = await asyncio.gather(*(read(peer, [Range(i, 3 * MIB)]) for i in range(4)))
            assert [bytes(part[0]) for part in rest] == [
                bytes(segment[i : i + 3 * MIB]) for i in range(4)
            ]


@pytest.mark.parametrize("kind", NETWORK_KINDS)
@pytest.mark.parametrize(
    "new_loop", [asyncio.new_event_loop, uvloop.new_event_loop], ids=["asyncio", "uvloop"]
)
def test_long_runs_of_bytes_arrive_whole(kind, new_loop):
    with asyncio.Runner(loop_factory=new_loop) as runner:
        runner.run(_pull_again_and_again(kind))
