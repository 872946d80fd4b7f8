"""The first token of a response's stream is told from the events before it."""

import asyncio

import pytest
from eventually import until
from upstreams import for_ever, streaming

from prefixfleet.router.first_token import FirstToken

CREATED = b'event: response.created\ndata: {"response":{"id":"r","input":"event: x"}}\n\n'
RUNNING = b'event: response.in_progress\ndata: {"response":{"id":"r"}}\n\n'
ADDED = b'event: response.output_item.added\ndata: {"item":{}}\n\n'


def parts_until_it_came(parts):
    """Number of parts after which the first token had come; 0 if it never did."""
    came = []
    hearer = FirstToken(lambda: came.append(True))
    for number, part in enumerate(parts, 1):
        hearer.hear(part)
        if came:
            assert hearer.done
            hearer.hear(ADDED)
            assert len(came) == 1
            return number
    return 0


@pytest.mark.parametrize("end", [b"\n", b"\r\n"])
def test_what_comes_before_it_is_none_however_it_is_cut(end):
    before = (b": hello\n\n" + CREATED + RUNNING).replace(b"\n", end)
    whole = before + ADDED.replace(b"\n", end)

    for size in (1, 7, 100):
        cut = [whole[start : start + size] for start in range(0, len(whole), size)]
        came = size * parts_until_it_came(cut)
        assert came > len(before), size
        assert came - size <= len(before) + len("event: response.output_item.added\n")
    assert parts_until_it_came([before]) == 0


def test_of_events_without_names_the_first_one_counts():
    assert parts_until_it_came([b": ping\n\n", b'data: {"response":{}}\n\n']) == 2


def test_a_long_event_is_not_kept():
    hearer = FirstToken(lambda: None)
    hearer.hear(CREATED[:-2])
    for _ in range(100):
        hearer.hear(b"x" * 10_000)

    assert len(hearer._line) < 1_000


async def test_a_stored_stream_that_has_only_begun_still_computes(rig):
    """Its worker is busy, and what its first bytes took is learned as nobody's prefill."""
    engine = await rig.engine(behave=streaming(CREATED, RUNNING, then=for_ever))
    router = await rig.start(engine)
    speed = router.dispatcher.speeds.of(engine.record())
    body = {"model": "tiny", "input": "hello", "stream": True}

    async with rig.client.post("/v1/responses", json=body) as answer:
        await answer.content.readline()
        load = router.book.load("a")
        assert (load.queued_requests, load.decoding) == (1, 0)
        assert router.dispatcher.speeds.of(engine.record()) == speed
    await until(lambda: not router.book.workers())

    engine.behave = streaming(CREATED, RUNNING, ADDED, then=for_ever)
    async with rig.client.post("/v1/responses", json=body):
        await until(lambda: router.book.load("a").decoding == 1)
        assert router.book.load("a").queued_requests == 0
        assert router.dispatcher.speeds.of(engine.record()) != speed
    await asyncio.sleep(0)
