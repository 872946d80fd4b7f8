"""The plan of a chaos run: replayed by its seed, and never all of a kind at once."""

from itertools import islice

import pytest
from chaos_plan import KINDS, Spared, rounds

GROUPS = {"router": ["r0", "r1"], "host real": ["n0", "n1"], "host": ["n2", "n3", "n4"]}


def some(seed, groups=GROUPS):
    return list(islice(rounds(seed, groups), 50))


def test_a_seed_is_replayed_and_another_one_is_another_plan():
    assert some(7) == some(7)
    assert some(7) != some(8)


def test_every_round_has_every_kind_once():
    for turn in some(1):
        assert sorted(fault.kind for fault in turn.faults) == sorted(KINDS)


def test_every_member_is_hit_by_every_kind_that_befalls_it():
    hit = {(fault.kind, fault.member) for turn in some(3) for fault in turn.faults}

    for kind, befalls in KINDS.items():
        members = {m for name, of in GROUPS.items() if name.split()[0] in befalls for m in of}
        assert {member for k, member in hit if k == kind} == (members or {""})


def test_the_only_one_of_its_kind_is_never_hit():
    lonely = {"router": ["r0"], "host": ["n0", "n1"]}

    assert all(fault.member != "r0" for turn in some(2, lonely) for fault in turn.faults)


@pytest.mark.parametrize("hurt", [set(), {"r0", "n1", "n3"}])
def test_one_of_each_group_is_spared_and_never_one_that_is_hurt(hurt):
    spared = Spared(GROUPS)
    for turn in some(5):
        spared.renew(turn.spare, hurt)
        whole = set(spared.now.values())
        assert len(whole) == len(GROUPS)
        assert not whole & hurt
        assert not whole & {spared.instead_of(fault.member) for fault in turn.faults}


def test_a_fault_meant_for_who_is_spared_befalls_another_of_its_group():
    spared = Spared(GROUPS)

    assert [spared.instead_of(m) for m in ("r0", "r1", "n0", "n2", "n4", "")] == [
        "r1", "r1", "n1", "n3", "n4", "",
    ]  # fmt: skip
