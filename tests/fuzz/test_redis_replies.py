"""A Redis that says anything: what comes out is unavailable or of the promised shape, never a
match beyond the chain, and no other error."""

import asyncio
import os
from contextlib import suppress

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from indexes import chain_of, node_record, segments

from prefixfleet.store.errors import Fenced, IndexUnavailable
from prefixfleet.store.index import Membership, StreamGap
from prefixfleet.store.redis_index import RedisIndex
from prefixfleet.store.redis_replies import MAX_SLOTS
from prefixfleet.store.registry import WorkerRegistry

CHAIN = chain_of("a", 4)
MEMBER = Membership("a", 1, 0)
EXAMPLES = int(os.environ.get("FUZZ_EXAMPLES", "48"))
LIKELY = [b"0", b"1", b"1 a", b"1-2", b"kind", b"publish", b"slot", b"identity", b"fields", b"\xff"]

leaf = st.one_of(
    st.none(),
    st.integers(-3, MAX_SLOTS + 3),
    st.sampled_from(LIKELY),
    st.binary(max_size=20),
    st.builds(lambda text: RuntimeError(text), st.sampled_from(["FENCED x", "LATE", "ERR", "é"])),
)
replies = st.recursive(leaf, lambda inner: st.lists(inner, max_size=7), max_leaves=20)


def encode(reply):
    """RESP2."""
    match reply:
        case None:
            return b"$-1\r\n"
        case int():
            return b":%d\r\n" % reply
        case bytes():
            return b"$%d\r\n%b\r\n" % (len(reply), reply)
        case list():
            return b"*%d\r\n%b" % (len(reply), b"".join(map(encode, reply)))
    return b"-" + str(reply).encode() + b"\r\n"


def well_formed(name, found):
    match name:
        case "match":
            return all(isinstance(n, str) and 0 < k <= len(CHAIN) for n, k in found.items())
        case "copies":
            return set(found) == set(CHAIN) and all(isinstance(n, int) for n in found.values())
        case "join":
            return found.node == "b" and isinstance(found.epoch, int)
        case "snapshot":
            live = sum(1 << m.slot for m in found.members)
            return all(bits & ~live == 0 for bits in found.holders.values())
        case "members":
            return all(m.node and r.node for m, r in found)
        case "workers":
            return all(record.worker for record in found)
    return True


async def first(stream):
    with suppress(StreamGap):
        return await anext(stream)


async def ask_all(url):
    index, registry = RedisIndex(url, "f", timeout_s=0.5), WorkerRegistry(url, "f", timeout_s=0.5)
    calls = {
        "join": lambda: index.join(node_record("b")),
        "renew": lambda: index.renew(MEMBER, node_record("a")),
        "publish": lambda: index.publish(MEMBER, segments(CHAIN)),
        "match": lambda: index.match(CHAIN),
        "copies": lambda: index.copies(segments(CHAIN)),
        "members": index.members,
        "follow": lambda: first(index.follow("1-1")),
        "workers": registry.workers,
        "withdraw": lambda: registry.withdraw("w"),
    }
    try:
        for name, call in calls.items():
            with suppress(IndexUnavailable, Fenced):
                async with asyncio.timeout(20):
                    assert well_formed(name, await call()), name
    finally:
        await index.close()
        await registry.close()


async def server_that_says(answers, work):
    """Run ``work`` with the URL of a server that gives ``answers`` in turn, for ever."""
    count = 0

    async def serve(reader, writer):
        nonlocal count
        with suppress(ConnectionError):
            while await reader.read(65536):
                writer.write(answers[count % len(answers)])
                count += 1
        writer.close()

    async with await asyncio.start_server(serve, "127.0.0.1", 0) as server:
        await work(f"redis://127.0.0.1:{server.sockets[0].getsockname()[1]}")


@pytest.mark.filterwarnings("ignore::ResourceWarning")
@settings(max_examples=EXAMPLES, suppress_health_check=list(HealthCheck), database=None)
@given(answers=st.lists(replies, min_size=1, max_size=4))
def test_any_replies_are_refused_or_have_the_promised_shape(answers):
    asyncio.run(server_that_says([encode(a) for a in answers], ask_all))


def test_right_replies_are_taken():
    """Else the test above would try refusals only."""

    async def work(url):
        index = RedisIndex(url, "f", timeout_s=20)
        try:
            assert await index.match(CHAIN) == {"a": 3}
        finally:
            await index.close()

    asyncio.run(server_that_says([encode([b"1 a", 3])], work))
