"""Hostile and broken engines: closed with a reason, nothing stays held, others are served."""

import asyncio
import struct

import msgpack
import pytest
from eventually import until
from node_rig import PlainEngine, fresh_chain, running_node, settings_of

from prefixfleet.cluster.engine_channel import MAX_FRAME_BYTES, encode_frame, join_hashes
from prefixfleet.store.memory_index import MemoryIndex

HELLO_LATER = 0.05


@pytest.fixture
async def daemon(tmp_path_factory):
    async with running_node(
        MemoryIndex(lease_s=60), settings_of(tmp_path_factory.mktemp("n"))
    ) as daemon:
        yield daemon


async def closed(reader):
    """Everything until the daemon closes the connection."""
    async with asyncio.timeout(20):
        return await reader.read()


@pytest.mark.parametrize(
    "junk",
    [
        struct.pack("<I", MAX_FRAME_BYTES + 1),
        struct.pack("<I", 4) + b"\xc1\xc1\xc1\xc1",
        struct.pack("<I", 1) + b"\x01",
        encode_frame({"id": 1, "op": "prepare"}),
        encode_frame({"id": 1, "op": "release", "request": "r"}),
        encode_frame({"id": 1, "op": "what"}),
        encode_frame({"id": -1, "op": "hello"}),
        b"GET / HTTP/1.1\r\n\r\n",
    ],
)
async def test_junk_instead_of_hello_is_closed_with_the_reason(daemon, junk):
    reader, writer = await asyncio.open_unix_connection(daemon.settings.socket_path)
    writer.write(junk)

    answer = await closed(reader)

    assert "error" in msgpack.unpackb(answer[4:])
    writer.close()
    await until(lambda: daemon.snapshot()["refused_engines"] == 1)
    assert daemon.snapshot()["connections"] == 0


@pytest.mark.parametrize(
    "fields",
    [
        {"op": "reserve", "parent": b"short", "hashes": b"", "rank": 0},
        {"op": "reserve", "parent": b"", "hashes": b"x" * 15, "rank": 0},
        {"op": "reserve", "parent": b"", "hashes": b"", "rank": 7},
        {"op": "reserve", "parent": b"", "hashes": "text", "rank": 0},
        {"op": "commit", "hashes": None, "rank": 0},
        {"op": "prepare", "request": "", "chain": b"", "plan": None, "budget_s": 1},
        {"op": "prepare", "request": "r", "chain": b"", "plan": None, "budget_s": -1},
        {"op": "hello"},
        {"op": "explode"},
    ],
)
async def test_a_wrong_question_ends_the_connection_and_frees_what_it_held(daemon, fields):
    chain = fresh_chain(4)
    async with PlainEngine.connected(daemon.settings.socket_path) as engine:
        await engine.put(chain[:2])
        await engine.prepare(chain)
        await engine.ask("reserve", parent=chain[1], hashes=join_hashes(chain[2:]), rank=0)

        with pytest.raises(ConnectionError):
            await engine.ask(**fields)

    def dram():
        tier = daemon.snapshot()["tiers"]["dram"]
        return tier["pinned"], tier["reserved"]

    await until(lambda: dram() == (0, 0))


@pytest.mark.parametrize(
    ("plan", "outcome"), [({"version": 1}, None), ("text", None), (None, {"request": "r"})]
)
async def test_a_record_that_is_none_is_refused_and_the_connection_goes_on(daemon, plan, outcome):
    async with PlainEngine.connected(daemon.settings.socket_path) as engine:
        if outcome is not None:
            answer = await engine.ask("outcome", outcome=outcome)
        elif isinstance(plan, dict):
            answer = await engine.ask("prepare", request="r", chain=b"", plan=plan, budget_s=1.0)
        else:
            with pytest.raises(ConnectionError):
                await engine.ask("prepare", request="r", chain=b"", plan=plan, budget_s=1.0)
            return

        assert "expected" in answer["error"]
        assert (await engine.prepare(fresh_chain(1)))["blocks"] == 0


async def test_other_engines_are_served_while_one_sends_junk(daemon):
    async with PlainEngine.connected(daemon.settings.socket_path) as good:
        reader, writer = await asyncio.open_unix_connection(daemon.settings.socket_path)
        writer.write(b"\xff" * 100)
        await closed(reader)
        writer.close()

        assert -1 not in await good.put(fresh_chain(3))


async def test_an_engine_that_never_says_hello_is_let_go(daemon, monkeypatch):
    monkeypatch.setattr("prefixfleet.cluster.engine_session.HELLO_S", HELLO_LATER)
    reader, writer = await asyncio.open_unix_connection(daemon.settings.socket_path)

    assert await closed(reader) == b""

    writer.close()
    await until(lambda: daemon.snapshot()["connections"] == 0)


async def test_one_connection_too_many_is_refused(daemon, monkeypatch):
    monkeypatch.setattr("prefixfleet.cluster.engine_server.MAX_SESSIONS", 1)
    async with PlainEngine.connected(daemon.settings.socket_path) as first:
        reader, writer = await asyncio.open_unix_connection(daemon.settings.socket_path)

        assert await closed(reader) == b""

        writer.close()
        assert (await first.prepare(fresh_chain(1)))["blocks"] == 0


async def test_an_engine_that_does_not_read_its_answers_is_dropped(daemon, monkeypatch):
    monkeypatch.setattr("prefixfleet.cluster.engine_session.ANSWER_S", 0.05)
    async with PlainEngine.connected(daemon.settings.socket_path) as engine:
        chain = fresh_chain(100)
        await engine.put(chain)
        assert engine._reading is not None
        engine._reading.cancel()
        question = {"op": "prepare", "request": "r", "chain": join_hashes(chain)}
        frame = encode_frame({"id": 9, **question, "plan": None, "budget_s": 1.0})

        async def flooded():
            if not engine.writer.is_closing():
                engine.writer.write(frame * 200)
            return daemon.snapshot()["connections"] == 0

        await until(flooded)

    await until(lambda: daemon.snapshot()["tiers"]["dram"]["pinned"] == 0)


async def test_a_question_asked_again_replaces_the_first_and_release_ends_it(daemon):
    chain = fresh_chain(4)
    async with PlainEngine.connected(daemon.settings.socket_path) as engine:
        await engine.put(chain)
        answers = await asyncio.gather(*(engine.prepare(chain) for _ in range(3)))

        assert [a.get("blocks", a.get("error")) for a in answers][-1] == 4
        await engine.ask("release", request="r")
        assert daemon.snapshot()["tiers"]["dram"]["pinned"] == 0


async def test_only_this_user_may_connect(daemon):
    assert daemon.settings.socket_path.stat().st_mode & 0o777 == 0o600
