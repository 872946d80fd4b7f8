"""What must hold of a fleet at every moment, and what must hold once it is at rest.

Stated once; the model checks ask after every step, the chaos runs at their end. Numbers name the
rules of DESIGN.md, "Rules that every part keeps".
"""

from collections.abc import Iterable

from model_fleet import SLOTS, Holding, ModelNode

from prefixfleet.store.memory_index import MemoryIndex


def no_slot_is_lost_or_used_twice(node: ModelNode) -> None:
    """Conservation. Leaf first, too: `check` proves that resident blocks form unbroken chains."""
    node.pool.check()


def a_resident_block_is_right(node: ModelNode) -> None:
    """A lost block is normal, a wrong block never."""
    for block, _ in node.pool.resident():
        with node.pool.pin([block]) as pin:  # its parent may be anything: the run is this block
            for slot in pin.slots:
                assert block in node.spoiled or node.is_right(block, slot), (
                    f"{node.name}: {block!r} in slot {slot} is wrong"
                )


def a_promised_prefix_stays(holding: Holding) -> None:
    """What was prepared is pinned: the same right bytes in the same slots until the release."""
    node = holding.node
    for block, slot in zip(holding.chain, holding.prepared.slots, strict=False):
        assert block in node.spoiled or node.is_right(block, slot), (
            f"{node.name}: {holding.request} lost {block!r} in slot {slot}"
        )


def the_index_names_nothing_that_was_given_away(node: ModelNode) -> None:
    """Publish last, withdraw first: while a life stands, all that the index says of it is here."""
    member = node.announcer._member
    if member is None or not node.announcer._joined:
        return
    life = node.index._lives.get(member.slot)
    if life is None or life.member != member:
        return  # its lease ended: nobody is told anything of it
    bit = 1 << member.slot
    said = {field for field, holders in node.index._holders.items() if holders & bit}
    here = {block[: len(f)] for block in node.pool._table.slot_of for f in said}
    assert said <= here, f"{node.name}: the index still names {said - here}"


def only_live_lives_are_named(index: MemoryIndex) -> None:
    """Fencing: no bit of a life that ended, no two lives of one node."""
    live = sum(1 << slot for slot in index._lives)
    assert all(holders & ~live == 0 for holders in index._holders.values())
    names = [life.member.node for life in index._lives.values()]
    assert len(names) == len(set(names))


def nothing_is_held_at_rest(node: ModelNode) -> None:
    """Every pin, lease, reservation and quarantine ends by itself."""
    counts = node.pool.counts()
    assert (counts.pinned, counts.reserved, counts.quarantined, counts.leaving) == (0, 0, 0, 0), (
        f"{node.name}: {counts}"
    )
    assert counts.free + counts.resident == SLOTS
    assert len(node.server.leases) == 0
    assert len(node.cache.claims) == 0
    assert node.cache.claims.waiting_hints == 0


def the_index_says_what_is_here(node: ModelNode, found: Iterable[tuple[list[bytes], int]]) -> None:
    """At rest the hint is exact: for each chain the index counts the blocks that are resident."""
    for chain, length in found:
        assert node.leading(chain) == length, f"{node.name}: index says {length} of {chain}"
