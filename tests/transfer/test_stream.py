"""A stream gives the bytes in order, however they were cut on the way and ahead of the asker."""

import asyncio
import contextlib
import random
import socket
import threading
import time

import pytest
from links import some_bytes

from prefixfleet.store.errors import PeerLost
from prefixfleet.transfer.crew import Crew
from prefixfleet.transfer.dial import tune
from prefixfleet.transfer.stream import AHEAD_BYTES, IN_THREAD_BYTES, Stream


@contextlib.asynccontextmanager
async def stream_and_sock():
    """A stream, and the socket at its other end."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        other = socket.create_connection(listening.getsockname())
        sock, _ = listening.accept()
    tune(sock)
    crew = Crew("test")
    stream = Stream(sock, "test", crew)
    with other:
        try:
            yield stream, other
        finally:
            await stream.close()
            crew.close()


@pytest.mark.parametrize("seed", range(5))
async def test_every_mix_of_receives_gives_the_bytes_in_order(seed):
    chance = random.Random(seed)
    sent = bytes(some_bytes(3 * IN_THREAD_BYTES))
    async with stream_and_sock() as (stream, other):
        sending = asyncio.create_task(asyncio.to_thread(other.sendall, sent))
        got = bytearray()
        while len(got) < len(sent):
            most = chance.choice([1, 64, AHEAD_BYTES + 1, 100_000, IN_THREAD_BYTES + 7])
            count = min(chance.randint(1, most), len(sent) - len(got))
            if chance.random() < 0.5:
                got += await stream.receive(count)
            else:
                cut = chance.randint(0, count)
                target = memoryview(bytearray(count))
                await stream.receive_into([target[:cut], target[cut:]])
                got += target
        await sending
        assert got == sent


async def test_what_came_ahead_fills_targets_without_another_byte():
    async with stream_and_sock() as (stream, other):
        other.sendall(b"head" + b"body")
        assert await stream.receive(4) == b"head"
        target = bytearray(4)
        await stream.receive_into([memoryview(target)])
        assert target == b"body"


async def test_a_drop_wakes_whoever_waits():
    async with stream_and_sock() as (stream, _):
        waiting = asyncio.create_task(stream.receive(1))
        await asyncio.sleep(0)
        stream.drop()
        with pytest.raises(PeerLost):
            await waiting
        with pytest.raises(PeerLost):
            await stream.send(b"late")


async def test_a_thread_that_ends_while_its_connection_is_closed_is_no_fault(monkeypatch):
    async with stream_and_sock() as (stream, _):
        may_end, wrap = threading.Event(), asyncio.wrap_future
        some = [memoryview(bytes(2 * IN_THREAD_BYTES))]
        moving = asyncio.create_task(stream._by_thread(lambda views: may_end.wait(20), some))
        await asyncio.sleep(0)

        def ends_now(thread):
            may_end.set()
            while thread in stream._in_threads:
                time.sleep(0.001)
            return wrap(thread)

        monkeypatch.setattr(asyncio, "wrap_future", ends_now)
        await stream.close()

        assert await moving
