"""What one engine can cost its follower, over real sockets: bounded time at once, bounded room."""

import asyncio
from contextlib import aclosing
from itertools import pairwise

import msgpack
import pytest
from engine_following import BLOCK, KEY, ROOT, follower_of, following, hold
from engine_publisher import EnginePublisher, removed
from eventually import until

from prefixfleet.store import engine_events, engine_mirror, engine_replay
from prefixfleet.store.chain import extend_chain
from prefixfleet.store.engine_events import PIECE_BYTES, decode_batch
from prefixfleet.store.engine_replay import HELD_UP_BYTES, read_message
from prefixfleet.store.errors import ProtocolError
from prefixfleet.store.event_slices import TURN

LONG = list(range(3 * TURN * BLOCK))
LONG_CHAIN = extend_chain(ROOT, LONG, BLOCK, KEY)
TOKENS = list(range(48))
CHAIN = extend_chain(ROOT, TOKENS, BLOCK, KEY)
OTHERS = list(range(100, 132))
OTHER_CHAIN = extend_chain(ROOT, OTHERS, BLOCK, KEY)
CLEARED = {"type": "AllBlocksCleared"}


class Turns:
    """Counts how often others had a turn on the loop."""

    def __init__(self):
        self.count = 0

    async def __aenter__(self):
        self._task = asyncio.create_task(self._take())
        return self

    async def __aexit__(self, *_):
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)

    async def _take(self):
        while True:
            self.count += 1
            await asyncio.sleep(0)


async def test_a_long_batch_leaves_turns_to_others():
    async with EnginePublisher() as engine, Turns() as turns:
        await engine.publish(engine.stored(LONG))
        await engine.publish(CLEARED)
        seen, held = [], set()
        async with aclosing(follower_of(engine.events, engine.replay).changes()) as changes:
            async for change in changes:
                seen.append((turns.count, len(change.added) + len(change.removed)))
                held = (held | set(change.added)) - set(change.removed)
                if len(held) == 0 and any(size for _, size in seen):
                    break

    assert max(size for _, size in seen) <= TURN
    assert sum(size for _, size in seen) == 2 * len(LONG_CHAIN)
    counts = [count for count, _ in seen]
    assert all(then > before for before, then in pairwise(counts))


async def test_a_long_batch_is_not_decoded_on_the_loop():
    payload = msgpack.packb([0.0, [{"type": "unknown", "ids": LONG}], 0])
    assert len(payload) > HELD_UP_BYTES
    async with Turns() as turns:
        await asyncio.sleep(0)
        before = turns.count
        assert (await read_message([bytes(8), payload]).batch()).events == ()
        assert turns.count > before


async def test_batches_that_come_meanwhile_wait_in_order():
    async with EnginePublisher() as engine, following(engine.events) as (follower, held):
        await engine.heard()
        await engine.publish(engine.stored(LONG))
        await engine.publish(removed(*range(3, len(LONG_CHAIN))))
        await engine.publish(engine.stored(OTHERS))

        await until(lambda: held == {*LONG_CHAIN[:3], *OTHER_CHAIN})
        assert (follower.batches, follower.losses.gaps, follower.losses.restarts) == (3, 0, 0)


@pytest.mark.parametrize("forgets", [True, False])
async def test_who_stops_within_a_batch_gets_all_of_it_later(forgets):
    """Half a batch must not be taken for one that was applied."""
    async with EnginePublisher() as engine:
        await engine.publish(engine.stored(LONG))
        follower, held = follower_of(engine.events, engine.replay), set()
        async with aclosing(follower.changes()) as changes:
            async for change in changes:
                held.update(change.added)
                if held:
                    break
        assert 0 < len(held) < len(LONG_CHAIN)

        if forgets:
            held.difference_update(follower.forget().removed)
        task = asyncio.create_task(hold(follower, held))
        await until(lambda: held == set(LONG_CHAIN))
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def test_blocks_beyond_the_bound_are_not_believed_until_there_is_room(monkeypatch):
    monkeypatch.setattr(engine_mirror, "MAX_COPIES", 4)
    async with EnginePublisher() as engine, following(engine.events) as (follower, held):
        await engine.heard()
        await engine.publish(engine.stored(TOKENS))
        await until(lambda: held == set(CHAIN))
        assert follower.whole
        assert not follower.fault

        await engine.publish(engine.stored(OTHERS))
        await until(lambda: held == {*CHAIN, OTHER_CHAIN[0]})
        await engine.publish(engine.stored(range(200, 216)))
        await until(lambda: follower.batches == 3)
        assert held == {*CHAIN, OTHER_CHAIN[0]}
        assert "2 were left out" in follower.fault
        assert (follower.losses.overflows, follower.whole) == (1, False)

        await engine.publish(removed(0, 1, 2))
        await until(lambda: held == {OTHER_CHAIN[0]})
        assert not follower.fault
        await engine.publish(engine.stored(TOKENS))
        await until(lambda: held == {*CHAIN, OTHER_CHAIN[0]})
        assert not follower.fault


async def test_a_cleared_cache_makes_room(monkeypatch):
    monkeypatch.setattr(engine_mirror, "MAX_COPIES", 2)
    async with EnginePublisher() as engine, following(engine.events) as (follower, held):
        await engine.heard()
        await engine.publish(engine.stored(TOKENS))
        await until(lambda: held == set(CHAIN[:2]))
        assert follower.fault

        await engine.publish(CLEARED, engine.stored(OTHERS))

        await until(lambda: held == set(OTHER_CHAIN))
        assert not follower.fault


async def test_a_batch_that_is_too_long_drops_what_was_known(monkeypatch):
    monkeypatch.setattr(engine_events, "MAX_PAYLOAD_BYTES", 1_000)
    async with EnginePublisher() as engine, following(engine.events) as (follower, held):
        await engine.heard()
        await engine.publish(engine.stored(TOKENS))
        await until(lambda: held == set(CHAIN))

        await engine.publish(payload=bytes(1_001))
        await until(lambda: not held)
        await engine.publish(engine.stored(OTHERS))

        await until(lambda: held == set(OTHER_CHAIN))
        assert follower.losses.malformed == 1


async def test_a_past_of_too_many_bytes_is_not_kept(monkeypatch):
    monkeypatch.setattr(engine_replay, "MAX_REPLAYED_BYTES", 100)
    async with EnginePublisher() as engine:
        await engine.publish(engine.stored(TOKENS))
        async with following(engine.events, engine.replay) as (follower, held):
            await engine.heard()
            await until(lambda: follower.losses.failed_replays == 1)
            await engine.publish(engine.stored(OTHERS))

            await until(lambda: held == set(OTHER_CHAIN))
            assert not follower.whole


def event(**fields):
    return [0.0, [{"type": "BlockRemoved", "block_hashes": [1]} | fields], 0]


@pytest.mark.parametrize(
    ("payload", "named"),
    [
        (msgpack.packb(event(block_hashes=[b"x" * 65])), "block_hashes"),
        (msgpack.packb(event(medium="x" * 65)), "medium"),
        (msgpack.packb(event()) + b"\0", "more bytes"),
        (msgpack.packb(event())[:-1], "truncated"),
        (msgpack.packb(event(many=[[]] * 600_000)), "lists and maps"),
        (b"", "truncated"),
    ],
    ids=["name", "medium", "more bytes", "truncated", "containers", "empty"],
)
def test_what_would_take_unbounded_room_or_is_no_batch_is_refused(payload, named):
    with pytest.raises(ProtocolError, match=named):
        decode_batch([bytes(8), payload])


@pytest.mark.parametrize("surplus", [-1, 0, 1])
def test_a_batch_may_end_where_a_piece_ends(surplus):
    payload = msgpack.packb(event(text="x" * (PIECE_BYTES + surplus)))
    payload = msgpack.packb(event(text="x" * (2 * PIECE_BYTES + surplus - len(payload))))

    assert len(decode_batch([bytes(8), payload]).events) == 1
