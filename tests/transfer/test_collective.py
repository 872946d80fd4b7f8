"""Broadcasts between four real processes over Gloo: whole, refused, spoiled, broken midway."""

import asyncio

import pytest
from collective_rig import Nodes
from eventually import until
from pulls import EPOCH

pytestmark = pytest.mark.timeout(400)  # importing torch in four processes takes its time
ENFORCE = ["enforce"] * 4


async def test_a_pull_makes_it_hot_and_the_others_get_every_block_that_is_right(tmp_path):
    async with Nodes.of(tmp_path, *ENFORCE) as nodes:
        asker, *others = nodes.others
        gone = ("n9", EPOCH, "tcp://127.0.0.1:9")  # lives no more, and holds nobody up
        await nodes.source.do("meet", [*(node.member for node in nodes.all), gone])
        assert (await asker.do("pull", nodes.source.contact))["blocks"] == 8
        for node in others:
            assert (await nodes.counted(node, "received"))["blocks"] == 8
        state = await nodes.counted(nodes.source, "broadcasts")
        assert state["counters"] == {
            "broadcasts": 1,
            "by_gloo": 1,
            "sent_bytes": 2 * 8 * 65536,
        }

        await asyncio.gather(*(node.do("evict") for node in nodes.others))
        with nodes.source.file.open("r+b") as file:
            file.seek(5 * 65536 + 1000)  # in the sixth slot; they lie in order
            file.write(b"spoiled")
        await nodes.source.do("replicate")
        for node in nodes.others:
            assert (await nodes.counted(node, "spoiled"))["blocks"] == 5


async def test_who_has_it_or_may_not_or_lives_anew_refuses(tmp_path):
    async with Nodes.of(tmp_path, "enforce", "off", "observe", "enforce") as nodes:
        off, observe, last = nodes.others
        for node in (off, observe):
            assert await nodes.source.do("refused", node.member) == {"reason": "refused"}
        name, epoch, contact = last.member
        assert await nodes.source.do("refused", [name, epoch + 1, contact]) == {"reason": "epoch"}
        await last.do("pull", nodes.source.contact)
        assert await nodes.source.do("refused", last.member) == {"reason": "refused"}


async def test_observe_counts_what_it_would_have_sent(tmp_path):
    async with Nodes.of(tmp_path, "observe", *["off"] * 3) as nodes:
        assert (await nodes.others[0].do("pull", nodes.source.contact))["blocks"] == 8
        state = await nodes.source.do("state")
        assert state["counters"] == {"observed": 1, "observed_bytes": 2 * 8 * 65536}
        assert state["child"] == 0
        assert await nodes.others[2].blocks() == 0


@pytest.mark.parametrize("end", ["kill", "freeze"])
async def test_a_node_that_dies_or_freezes_in_the_middle_holds_nobody_up(tmp_path, end):
    big = {"blocks": 64, "block_bytes": 1 << 20, "stall_s": 2.0}
    async with Nodes.of(tmp_path, *ENFORCE, **big) as nodes:
        first, victim, last = nodes.others
        await until(lambda: _begun(nodes.source, victim), 90)
        getattr(victim, end)()
        left = [nodes.source, first, last, *([victim] if end == "freeze" else [])]
        for node in left:  # the source first: it may invite them anew
            await until(lambda node=node: _at_rest(node), 90)
        await nodes.source.do("meet", [])  # the pulls make it hot too
        for node in left[1:]:
            pulled = await node.do("pull", nodes.source.contact)  # the rest, if there is one
            assert (pulled["blocks"], await node.blocks()) == (64, 64)
            await node.do("evict")
        await nodes.source.do("meet", [node.member for node in nodes.all])
        await nodes.source.do("replicate")  # a group of those that live, the frozen one's heir too
        for node in left[1:]:
            await until(lambda node=node: _all(node), 90)


async def _begun(source, node):
    """Whether the first bytes have come; a broadcast that a machine's stall broke begins anew."""
    if not any(node.file.read_bytes()[:64]) and await _at_rest(source):
        await source.do("replicate")
    return any(node.file.read_bytes()[:64])


async def _at_rest(node):
    state = await node.do("state")
    return state["at_rest"] and not state["reserved"]


async def _all(node):
    return (await node.do("matched"))["blocks"] == 64 and await node.blocks() == 64
