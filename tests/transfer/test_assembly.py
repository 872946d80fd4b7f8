"""What is read from whom, and commits in the order of the chain."""

from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pulls import PoolNode, chain

from prefixfleet.transfer.assembly import Assembly

CHAIN = chain(10)


@pytest.fixture
def node():
    return PoolNode("target", slots=16)


def assemble(node, at_once=3, hashes=CHAIN):
    return Assembly(node.pool.reserve(b"", hashes), node.pool, at_once)


def test_work_is_handed_out_in_order_and_once(node):
    assembly = assemble(node)

    works = [assembly.take(10) for _ in range(5)]

    assert works == [(0, 1, 2), (3, 4, 5), (6, 7, 8), (9,), None]


def test_a_source_gets_no_block_that_it_does_not_have(node):
    assembly = assemble(node)

    assert [assembly.take(4), assembly.take(4), assembly.take(4)] == [(0, 1, 2), (3,), None]
    assert assembly.take(10) == (4, 5)


def test_blocks_are_committed_in_the_order_of_the_chain(node):
    assembly = assemble(node)
    first, second = assembly.take(10), assembly.take(10)

    assembly.landed(second)
    assert (assembly.blocks, assembly.committed) == (0, 0)
    assembly.landed(first)

    assert (assembly.blocks, assembly.committed) == (6, 6)
    assert node.pool.match(CHAIN) == 6


def test_work_that_is_given_back_is_the_next(node):
    assembly = assemble(node)
    first, _ = assembly.take(10), assembly.take(10)

    assembly.give_back(first[1:])

    assert assembly.take(10) == (1, 2)


def test_blocks_that_are_here_are_not_read_and_count(node):
    node.fill(CHAIN[:4])

    assembly = assemble(node)

    assert (assembly.blocks, assembly.end) == (4, 10)
    assert assembly.take(10) == (4, 5, 6)


def test_it_ends_before_a_block_that_somebody_else_writes(node):
    with node.pool.reserve(b"", CHAIN[:6]) as other:
        for block in CHAIN[:4]:
            other.commit(block)

        assembly = assemble(node)

        assert (assembly.blocks, assembly.end, assembly.finished) == (4, 4, True)
        assert assembly.take(10) is None


def test_it_ends_where_a_block_before_left_the_pool(node):
    node.fill(CHAIN[:2])
    assembly = assemble(node)
    work = assembly.take(10)
    node.pool.free(node.pool.drop(CHAIN[1]))

    assembly.landed(work)

    assert assembly.finished
    assert assembly.take(10) is None
    assert node.pool.match(CHAIN) == 1


def test_it_is_settled_when_nobody_has_work_of_it_any_more(node):
    node.fill(CHAIN[:2])
    assembly = assemble(node)
    first, second = assembly.take(10), assembly.take(10)
    node.pool.free(node.pool.drop(CHAIN[1]))

    assembly.landed(first)
    assert (assembly.finished, assembly.settled) == (True, False)  # bytes may still arrive
    assembly.give_back(second)

    assert assembly.settled
    assert assembly.next is None


def test_quarantined_work_is_nobodys_until_it_is_released(node):
    assembly = assemble(node)
    work = assembly.take(10)

    slots = assembly.quarantine(work)

    assert node.pool.counts().quarantined == len(slots) == 3
    node.pool.release_quarantine(slots)
    node.pool.check()


@given(st.integers(), st.integers(1, 4))
def test_whatever_the_order_all_blocks_become_whole_once(seed, at_once):
    random = Random(seed)
    node = PoolNode("target", slots=16)
    assembly = assemble(node, at_once)
    taken = []
    while work := assembly.take(10):
        if random.random() < 0.3:
            assembly.give_back(work)
        else:
            taken.append(work)
    random.shuffle(taken)

    for work in taken:
        assembly.landed(work)
        node.pool.check()

    assert (assembly.blocks, assembly.committed) == (10, 10)
    assert assembly.finished
