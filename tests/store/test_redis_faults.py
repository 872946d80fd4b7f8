"""A server that is silent, old, hostile or does not let us in; and what errors must not say."""

import asyncio
import os
import signal
from contextlib import asynccontextmanager

import pytest
from eventually import until
from indexes import chain_of, node_record, segments
from redis_servers import index_at

from prefixfleet.store.errors import ConfigError, IndexUnavailable
from prefixfleet.store.index import StreamGap
from prefixfleet.store.redis_index import RedisIndex

CHAIN = chain_of("a", 4)


async def first(stream):
    async with asyncio.timeout(20):
        return await anext(stream)


def calls(index, member):
    return {
        "join": lambda: index.join(node_record("b")),
        "renew": lambda: index.renew(member, node_record("a")),
        "leave": lambda: index.leave(member),
        "publish": lambda: index.publish(member, segments(CHAIN)),
        "withdraw": lambda: index.withdraw(member, segments(CHAIN)),
        "match": lambda: index.match(CHAIN),
        "copies": lambda: index.copies(segments(CHAIN)),
        "members": index.members,
        "snapshot": index.snapshot,
        "follow": lambda: first(index.follow("1-1")),
        "prepare": index.prepare,
    }


async def test_a_silent_server_makes_every_call_unavailable_within_its_limit(own_server):
    async with index_at(own_server.url) as other, index_at(own_server.url, timeout_s=0.1) as index:
        member = await other.join(node_record("a"))
        os.kill(own_server.pid, signal.SIGSTOP)
        try:
            for call in calls(index, member).values():
                async with asyncio.timeout(20):
                    with pytest.raises(IndexUnavailable, match="no answer within"):
                        await call()
        finally:
            os.kill(own_server.pid, signal.SIGCONT)

        await until(lambda: answers(index))


async def finds(index):
    """Whether ``a`` has the chain; not if the answer is late."""
    try:
        return await index.match(CHAIN) == {"a": 4}
    except IndexUnavailable:
        return False


async def answers(index):
    try:
        await index.members()
    except IndexUnavailable:
        return False
    return True


async def test_an_answer_that_comes_too_late_is_not_taken_for_that_of_another_call(own_server):
    """A call that gave up takes its connection along, or the next call would read its answer."""
    other = chain_of("b", 4)
    async with index_at(own_server.url) as index, index_at(own_server.url, timeout_s=0.05) as hasty:
        a = await index.join(node_record("a"))
        await index.publish(a, segments(CHAIN))
        await until(lambda: finds(hasty))
        os.kill(own_server.pid, signal.SIGSTOP)
        try:
            for _ in range(5):
                with pytest.raises(IndexUnavailable):
                    await hasty.match(CHAIN)
        finally:
            os.kill(own_server.pid, signal.SIGCONT)

        await until(lambda: answers(hasty))
        for _ in range(20):
            assert await index.match(other) == {}
            try:
                assert await hasty.match(other) == {}
            except IndexUnavailable:
                continue  # slow, not wrong


async def test_a_change_that_comes_late_is_not_done_behind_a_later_one(own_server):
    """A publication without an answer, done after the withdrawal, would leave a block in the
    index that the node gave away."""
    async with (
        index_at(own_server.url) as index,
        index_at(own_server.url, timeout_s=0.05) as hasty,
        index_at(own_server.url) as late,
    ):
        a = await index.join(node_record("a"))
        os.kill(own_server.pid, signal.SIGSTOP)
        try:
            with pytest.raises(IndexUnavailable):
                await hasty.publish(a, segments(CHAIN))
        finally:
            os.kill(own_server.pid, signal.SIGCONT)
        await until(lambda: withdrawn(hasty, a))

        with pytest.raises(IndexUnavailable, match="LATE"):
            await late.publish(a, segments(CHAIN))  # as the first one, still under way

        assert await index.match(CHAIN) == {}
        await until(lambda: published(hasty, a))
        assert await index.match(CHAIN) == {"a": 4}


async def published(index, member):
    try:
        await index.renew(member, node_record("a"))
        await index.publish(member, segments(CHAIN))
    except IndexUnavailable:
        return False
    return True


async def withdrawn(index, member):
    try:
        await index.withdraw(member, segments(CHAIN))
    except IndexUnavailable:
        return False
    return True


async def test_a_cancelled_call_ends_wherever_it_is(redis_url):
    """Also while the connection is made, where redis-py may lose the cancellation."""
    for steps in range(60):
        async with index_at(redis_url) as index:
            call = asyncio.create_task(index.members())
            for _ in range(steps):
                await asyncio.sleep(0)
            asked = call.cancel()

            await asyncio.wait({call}, timeout=20)

            assert call.cancelled() == asked


async def test_an_address_where_nobody_listens_is_unavailable(tmp_path):
    async with index_at(f"unix://{tmp_path}/nobody.sock") as index:
        for call in calls(index, None).items():
            if call[0] in ("join", "match", "members", "snapshot", "follow", "prepare"):
                with pytest.raises(IndexUnavailable, match=r"nobody\.sock"):
                    await call[1]()


ANSWERS = {
    "junk": b"\x00\xff\xfenonsense\r\n",
    "http": b"HTTP/1.1 400 Bad Request\r\n\r\n",
    "text": b"$5\r\nhello\r\n",
    "status": b"+OK\r\n",
    "number": b":-7\r\n",
    "nothing": b"$-1\r\n",
    "no list": b"*-1\r\n",
    "empty list": b"*0\r\n",
    "one": b"*1\r\n$1\r\nx\r\n",
    "numbers": b"*3\r\n:1\r\n:2\r\n:3\r\n",
    "texts": b"*3\r\n$1\r\nx\r\n$1\r\ny\r\n$1\r\nz\r\n",
    "nested": b"*2\r\n*1\r\n*0\r\n$1\r\nx\r\n",
    "lists": b"*5\r\n*0\r\n*0\r\n*0\r\n*0\r\n*0\r\n",
    "too far": b"*2\r\n$3\r\n1 x\r\n:9999\r\n",
    "below zero": b"*2\r\n$3\r\n1 x\r\n:-1\r\n",
    "no node": b"*2\r\n$2\r\n\xff\xfe\r\n:1\r\n",
    "error": b"-ERR whatever\r\n",
    "bad error": b"-\xff\xfe\r\n",
    "half": b"*3\r\n$1\r\nx",
    "closed": b"",
}


@asynccontextmanager
async def server_that_says(answer):
    """A server that takes any command and answers always the same."""

    async def serve(reader, writer):
        while answer and await reader.read(65536):
            writer.write(answer)
            if answer == ANSWERS["half"]:
                break
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    async with server:
        yield f"redis://127.0.0.1:{server.sockets[0].getsockname()[1]}"


@pytest.mark.parametrize("answer", ANSWERS)
@pytest.mark.parametrize("question", ["join", "match", "copies", "members", "snapshot", "follow"])
async def test_an_unsound_answer_is_unavailable_or_nothing_never_a_match(answer, question):
    async with server_that_says(ANSWERS[answer]) as url, index_at(url, timeout_s=0.5) as index:
        try:
            found = await calls(index, None)[question]()
        except (IndexUnavailable, StreamGap):
            return
        assert answer in ("empty list", "numbers")  # the two that look like a right answer
        assert (question, found) in [("match", {})] or question == "join"


async def test_a_server_without_functions_is_refused_at_start():
    info = b"# Server\r\nredis_version:6.2.14\r\n"
    async with (
        server_that_says(b"$%d\r\n%b\r\n" % (len(info), info)) as url,
        index_at(url) as index,
    ):
        with pytest.raises(ConfigError, match="got version 6, expected Redis 7"):
            await index.prepare()


async def test_a_sound_server_passes_the_check_at_start(index):
    await index.prepare()
    await index.prepare()


async def test_a_wrong_password_is_refused_at_start_and_told_to_nobody(redis_url, caplog):
    wrong = redis_url.replace("://:", "://:wrong-")
    async with index_at(wrong) as index:
        with pytest.raises(ConfigError) as refused:
            await index.prepare()
        with pytest.raises(IndexUnavailable) as unavailable:
            await index.match(CHAIN)

    password = wrong.split(":")[2].split("@")[0]
    for text in (str(refused.value), str(unavailable.value), caplog.text, repr(index)):
        assert password not in text
        assert password.removeprefix("wrong-") not in text


@pytest.mark.parametrize(
    "url",
    [
        "",
        "http://:s3cret@localhost",
        "redis://:pass/s3cret@localhost:1",
        "redis://:s3cret@localhost:s3cret",
        "redis://:s3cret@localhost/0?socket_timeout=s3cret",
        "redis://localhost?s3cret=1",
        "s3cret",
    ],
)
def test_a_url_that_is_none_of_ours_is_refused_without_repeating_it(url):
    with pytest.raises(ConfigError, match="PREFIXFLEET_REDIS_URL") as refused:
        RedisIndex(url, "f")

    assert "s3cret" not in str(refused.value)
    assert refused.value.__cause__ is None


@pytest.mark.parametrize(
    "url", ["redis://h", "redis://u:p@h:1/2", "rediss://h:1", "unix://:p@/tmp/s", "redis://[::1]:1"]
)
def test_every_kind_of_redis_url_is_taken(url):
    RedisIndex(url, "f")
