"""Contract of the prefix index: what is matched and counted. Every backend passes it unchanged."""

import asyncio
import random

import pytest
from indexes import chain_of, fork, segments

from prefixfleet.store.index import Membership

CHAIN = chain_of("a", 4)
LONG = chain_of("long", 3000)


async def test_an_empty_index_matches_nothing(index):
    assert await index.match(CHAIN) == {}


async def test_an_empty_chain_matches_nobody(backend, index):
    await index.publish(await backend.join("a"), segments(CHAIN))

    assert await index.match([]) == {}


async def test_a_node_without_blocks_is_left_out_of_a_match(backend, index):
    await backend.join("a")

    assert await index.match(CHAIN) == {}


@pytest.mark.parametrize("length", [1, 2, 127, 128, 129, 255, 256, 257, 1023, 1024, 1025, 3000])
async def test_a_published_chain_is_matched_to_its_end(backend, index, length):
    """Around the sizes of a segment (128), of a publishing call (256) and of a lookup (1024)."""
    a = await backend.join("a")
    await index.publish(a, segments(LONG[:length]))

    assert await index.match(LONG) == {"a": length}
    assert await index.match(LONG[:length]) == {"a": length}
    assert await index.match(LONG[: length // 2 + 1]) == {"a": length // 2 + 1}


@pytest.mark.parametrize("hole", [0, 1, 2])
async def test_a_match_ends_at_the_first_missing_block(backend, index, hole):
    """KV of a block is useless without all before it."""
    present = [i for i in range(4) if i != hole]
    await index.publish(await backend.join("a"), segments(CHAIN, *present))

    assert await index.match(CHAIN) == ({"a": hole} if hole else {})


@pytest.mark.parametrize("hole", [127, 128, 129, 1024, 2047])
async def test_a_hole_in_a_long_chain_ends_the_match_there(backend, index, hole):
    a = await backend.join("a")
    await index.publish(a, segments(LONG))

    await index.withdraw(a, segments(LONG, hole))

    assert await index.match(LONG) == {"a": hole}


@pytest.mark.parametrize("hole", [0, 500, 1023, 1024, 2500])
async def test_a_hole_on_one_node_ends_its_match_and_not_that_of_others(backend, index, hole):
    a, b = await backend.join("a"), await backend.join("b")
    await index.publish(a, segments(LONG))
    await index.publish(b, segments(LONG))

    await index.withdraw(b, segments(LONG, hole))

    assert await index.match(LONG) == {"a": 3000} | ({"b": hole} if hole else {})


async def test_a_missing_segment_ends_the_match_before_it(backend, index):
    a = await backend.join("a")
    await index.publish(a, segments(LONG))

    await index.withdraw(a, segments(LONG, *range(256, 384)))

    assert await index.match(LONG) == {"a": 256}


async def test_each_node_is_matched_to_its_own_length(backend, index):
    for name, length in [("a", 3000), ("b", 1), ("c", 128), ("d", 1100)]:
        await index.publish(await backend.join(name), segments(LONG[:length]))

    assert await index.match(LONG) == {"a": 3000, "b": 1, "c": 128, "d": 1100}


async def test_chains_that_diverge_match_up_to_the_fork(backend, index):
    """They share a segment key, since they begin with the same block."""
    trunk = chain_of("trunk", 200)
    branch = fork(trunk, 100, "branch", 200)
    await index.publish(await backend.join("a"), segments(trunk))
    await index.publish(await backend.join("b"), segments(branch))

    assert await index.match(trunk) == {"a": 200, "b": 100}
    assert await index.match(branch) == {"a": 100, "b": 200}


async def test_chains_without_a_common_block_do_not_meet(backend, index):
    await index.publish(await backend.join("a"), segments(CHAIN))

    assert await index.match(chain_of("other", 4)) == {}


async def test_many_nodes_are_told_apart(backend, index):
    """More nodes than bits in a byte."""
    for number in range(20):
        a = await backend.join(f"n{number}")
        await index.publish(a, segments(LONG[: number + 1]))

    assert await index.match(LONG) == {f"n{number}": number + 1 for number in range(20)}


async def test_two_publishes_and_one_withdrawal_leave_a_block_absent(backend, index):
    a = await backend.join("a")
    await index.publish(a, segments(CHAIN))
    await index.publish(a, segments(CHAIN))

    await index.withdraw(a, segments(CHAIN, 2, 3))

    assert await index.match(CHAIN) == {"a": 2}


async def test_withdrawing_unknown_blocks_changes_nothing(backend, index):
    a = await backend.join("a")
    await index.publish(a, segments(CHAIN))

    await index.withdraw(a, segments(chain_of("other", 300)))
    await index.withdraw(a, segments(CHAIN, 3))
    await index.withdraw(a, segments(CHAIN, 3))

    assert await index.match(CHAIN) == {"a": 3}


async def test_a_withdrawal_takes_one_nodes_copy_only(backend, index):
    a, b = await backend.join("a"), await backend.join("b")
    await index.publish(a, segments(CHAIN))
    await index.publish(b, segments(CHAIN))

    await index.withdraw(a, segments(CHAIN))

    assert await index.match(CHAIN) == {"b": 4}


async def test_a_block_published_again_after_its_withdrawal_is_matched(backend, index):
    a = await backend.join("a")
    await index.publish(a, segments(CHAIN))
    await index.withdraw(a, segments(CHAIN))

    await index.publish(a, segments(CHAIN))

    assert await index.match(CHAIN) == {"a": 4}


async def test_publishing_nothing_is_allowed(backend, index):
    a = await backend.join("a")

    await index.publish(a, {})
    await index.publish(a, {CHAIN[0]: []})
    await index.withdraw(a, {})

    assert (await index.snapshot()).holders == {}


async def test_copies_counts_the_live_holders_of_each_block(backend, index):
    a, b = await backend.join("a"), await backend.join("b")
    await index.publish(a, segments(LONG[:300]))
    await index.publish(b, segments(LONG[:200]))

    counts = await index.copies(segments(LONG[:400]))

    assert counts == {b: 2 if i < 200 else int(i < 300) for i, b in enumerate(LONG[:400])}
    assert await index.copies({}) == {}


async def test_copies_on_ended_lives_do_not_count(backend, index):
    a, b = await backend.join("a"), await backend.join("b", mortal=True)
    c = await backend.join("c")
    for member in (a, b, c):
        await index.publish(member, segments(CHAIN))

    await index.leave(c)
    await backend.lapse()

    assert set((await index.copies(segments(CHAIN))).values()) == {1}


async def test_publishers_at_once_lose_nothing(backend, index):
    members = [await backend.join(f"n{i}") for i in range(4)]

    await asyncio.gather(*(index.publish(member, segments(LONG[:600])) for member in members))

    assert await index.match(LONG) == {f"n{i}": 600 for i in range(4)}


@pytest.mark.parametrize("filler", [b"\0", b"\xff", b"\n", b" ", b"*", b"}", b"\r\n$5", b"%"])
async def test_hashes_of_any_bytes_are_kept_apart(backend, index, filler):
    chain = [bytes([i]) + (filler * 16)[:15] for i in range(4)]
    other = [bytes([i + 128]) + (filler * 16)[:15] for i in range(4)]
    await index.publish(await backend.join("a"), segments(chain))

    assert await index.match(chain) == {"a": 4}
    assert await index.match(other) == {}
    assert await index.match([chain[0], *other]) == {"a": 1}


@pytest.mark.parametrize("name", ["two words", "ключ", "1 2", " ", "a\nb", "x" * 300])
async def test_node_names_of_any_text_come_back(backend, index, name):
    a = await backend.join(name)
    await index.publish(a, segments(CHAIN))

    assert await index.match(CHAIN) == {name: 4}
    assert [member for member, _ in await index.members()] == [a]


async def test_a_hash_too_short_for_a_field_is_refused(backend, index):
    a = await backend.join("a")

    with pytest.raises(ValueError, match="shorter than 8 bytes"):
        await index.publish(a, {b"short": [b"short"]})


@pytest.mark.parametrize("seed", range(5))
async def test_a_random_history_agrees_with_a_plain_model(backend, index, seed):
    chance = random.Random(seed)
    trunk = chain_of("t", 140)
    chains = [trunk, fork(trunk, 5, "u", 300), fork(trunk, 130, "v", 150), chain_of("w", 20)]
    lives: dict[str, Membership] = {}
    held: dict[str, set[bytes]] = {}
    for _ in range(120):
        name = chance.choice("abcd")
        action = chance.choice(["join", "leave", "publish", "publish", "withdraw", "withdraw"])
        if action == "join" or name not in lives:
            lives[name] = await backend.join(name)
            held[name] = set()
        elif action == "leave":
            await index.leave(lives.pop(name))
            del held[name]
        else:
            chain = chance.choice(chains)
            start = chance.randrange(len(chain))
            part = range(start, chance.randrange(start, len(chain)) + 1)
            change = index.publish if action == "publish" else index.withdraw
            await change(lives[name], segments(chain, *part))
            blocks = {chain[i] for i in part}
            held[name] = held[name] | blocks if action == "publish" else held[name] - blocks
        chain = chance.choice(chains)
        assert await index.match(chain) == expected_match(chain, held)


def expected_match(chain, held):
    lengths = {}
    for name, blocks in held.items():
        missing = [i for i, block in enumerate(chain) if block not in blocks]
        lengths[name] = min(missing, default=len(chain))
    return {name: length for name, length in lengths.items() if length}
