"""Following an engine's events over real sockets: late, with gaps, broken off, restarted."""

import asyncio
from contextlib import asynccontextmanager

import pytest
from engine_following import BLOCK, KEY, ROOT, following
from engine_publisher import EnginePublisher, removed
from eventually import until

from prefixfleet.store.chain import extend_chain
from prefixfleet.store.engine_mirror import Change, joined

TOKENS = list(range(48))
CHAIN = extend_chain(ROOT, TOKENS, BLOCK, KEY)
OTHERS = list(range(100, 132))
OTHER_CHAIN = extend_chain(ROOT, OTHERS, BLOCK, KEY)


async def test_blocks_come_and_go():
    async with EnginePublisher() as engine, following(engine.events) as (follower, held):
        await engine.heard()
        await engine.publish(engine.stored(TOKENS))
        await until(lambda: held == set(CHAIN))

        await engine.publish(removed(2))

        await until(lambda: held == set(CHAIN[:2]))
        assert (follower.batches, follower.whole) == (2, True)


async def test_who_comes_late_is_told_the_past():
    async with EnginePublisher() as engine:
        await engine.publish(engine.stored(TOKENS))
        await engine.publish(removed(2))

        async with following(engine.events, engine.replay) as (follower, held):
            await until(lambda: held == set(CHAIN[:2]))

            assert follower.whole


async def test_a_past_that_is_no_longer_whole_is_said_to_be_so():
    async with EnginePublisher(keep=1) as engine:
        await engine.publish(engine.stored(TOKENS))
        await engine.publish(engine.stored(OTHERS))

        async with following(engine.events, engine.replay) as (follower, held):
            await until(lambda: held == set(OTHER_CHAIN))

            assert not follower.whole


async def test_a_gap_is_replayed():
    async with (
        EnginePublisher() as engine,
        following(engine.events, engine.replay) as (
            follower,
            held,
        ),
    ):
        await engine.heard()
        await engine.publish(engine.stored(TOKENS))
        await until(lambda: held == set(CHAIN))
        await engine.publish(removed(1, 2), lost=True)
        await engine.publish(engine.stored(OTHERS))

        await until(lambda: held == {CHAIN[0], *OTHER_CHAIN})
        assert follower.losses.gaps == 1
        assert follower.whole


@pytest.mark.parametrize("replay", ["none", "too short"])
async def test_a_gap_that_cannot_be_replayed_drops_what_was_known(replay):
    """A view that keeps blocks whose removal it missed routes to nothing for ever."""
    async with EnginePublisher(keep=1) as engine:
        at = engine.replay if replay == "too short" else ""
        async with following(engine.events, at) as (follower, held):
            await engine.heard()
            await engine.publish(engine.stored(TOKENS))
            await until(lambda: held == set(CHAIN))
            await engine.publish(removed(1, 2), lost=True)
            await engine.publish(engine.stored(OTHERS))

            await until(lambda: held == set(OTHER_CHAIN))
            assert follower.losses.gaps == 1
            assert not follower.whole


@pytest.mark.parametrize("replay", [True, False], ids=["replay", "no replay"])
async def test_a_restarted_engine_holds_nothing_of_before(replay):
    """Its sequence starts again, and may have passed the old one when we are back."""
    async with (
        EnginePublisher() as old,
        following(old.events, old.replay if replay else "") as (_, held),
    ):
        await old.heard()
        await old.publish(old.stored(TOKENS))
        await until(lambda: held == set(CHAIN))
        await old.stop()

        async with EnginePublisher(ports=old.ports) as new:
            await new.publish(new.stored(OTHERS))
            await new.publish()
            await new.heard()
            await new.publish(new.stored(TOKENS[:16]))

            expected = {CHAIN[0], *(OTHER_CHAIN if replay else ())}
            await until(lambda: held == expected)


@asynccontextmanager
async def breakable(endpoint):
    """A way to ``endpoint`` whose connections can be broken; gives its own endpoint, and how."""
    writers = []

    async def pump(reader, writer):
        while data := await reader.read(65_536):
            writer.write(data)
        writer.close()

    async def serve(reader, writer):
        there, back = await asyncio.open_connection("127.0.0.1", int(endpoint.rsplit(":", 1)[1]))
        writers.extend((writer, back))
        await asyncio.gather(pump(reader, back), pump(there, writer), return_exceptions=True)

    def break_all():
        for writer in writers:
            writer.transport.abort()
        writers.clear()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    try:
        yield f"tcp://127.0.0.1:{server.sockets[0].getsockname()[1]}", break_all
    finally:
        server.close()
        break_all()


async def test_a_connection_that_broke_costs_nothing_if_the_engine_lived_on():
    async with (
        EnginePublisher() as engine,
        breakable(engine.events) as (events, break_all),
        following(events, engine.replay) as (follower, held),
    ):
        await engine.heard()
        await engine.publish(engine.stored(TOKENS))
        await until(lambda: held == set(CHAIN))
        await engine.publish(engine.stored(OTHERS), lost=True)

        break_all()

        await until(lambda: held == {*CHAIN, *OTHER_CHAIN})
        assert follower.losses.restarts == 0


async def test_a_sequence_that_goes_back_is_another_life():
    async with EnginePublisher() as engine, following(engine.events) as (follower, held):
        await engine.heard()
        for _ in range(3):
            await engine.publish()
        await engine.publish(engine.stored(TOKENS))
        await until(lambda: held == set(CHAIN))
        engine.sequence = 1  # its batch 0 is lost on the way

        await engine.publish(engine.stored(OTHERS))

        await until(lambda: held == set(OTHER_CHAIN))
        assert follower.losses.restarts == 1


async def test_junk_drops_what_was_known_and_goes_on():
    async with EnginePublisher() as engine, following(engine.events) as (follower, held):
        await engine.heard()
        await engine.publish(engine.stored(TOKENS))
        await until(lambda: held == set(CHAIN))

        await engine.publish(payload=b"\xc1")
        await until(lambda: not held)
        await engine.publish(engine.stored(OTHERS))

        await until(lambda: held == set(OTHER_CHAIN))
        assert follower.losses.malformed == 1


def test_joined_changes_are_what_both_did():
    first = Change(added=(b"a", b"b"), removed=(b"c", b"d"))
    then = Change(added=(b"c", b"e"), removed=(b"b", b"f"))

    both = joined(first, then)

    assert set(both.added) == {b"a", b"e"}
    assert set(both.removed) == {b"d", b"f"}
