"""What is worth a write when the disk is full: the fleet's last copy of what was used."""

import asyncio
import mmap

import pytest
from disks import disk_of

from prefixfleet.cluster.demotion import Demotion
from prefixfleet.store.eviction import LruOrder
from prefixfleet.store.pool import SlotPool
from prefixfleet.store.slot import SlotLayout, seal
from prefixfleet.store.slot_files import SlotFiles
from prefixfleet.store.ssd import SsdTier

NAMESPACE = b"n" * 16
LAYOUT = SlotLayout(payload_bytes=4000)
SLOTS = 12
DISK_SLOTS = 4
USED, UNUSED = ([bytes([n + i]) * 16 for i in range(3)] for n in (1, 100))


class World:
    """A pool with its bytes over a disk of four slots."""

    def __init__(self, tier, clock):
        self.pool = SlotPool(SLOTS, LruOrder(), clock)
        self.memory = memoryview(mmap.mmap(-1, SLOTS * LAYOUT.slot_bytes))
        self.tier = tier
        self.demotion = Demotion(self.pool, tier, self.slot, clock)
        self.withdrawn = set()  # from the index, as whoever evicts does it

    def slot(self, number):
        return self.memory[number * LAYOUT.slot_bytes : (number + 1) * LAYOUT.slot_bytes]

    def put(self, chain):
        with self.pool.reserve(b"", chain) as reservation:
            for block, slot in zip(chain, reservation.slots, strict=True):
                seal(self.slot(slot), LAYOUT, NAMESPACE, block)
                reservation.commit(block)

    async def evict(self, count, elsewhere=()):
        victims = self.pool.choose_victims(count)
        self.demotion.expect(victims)
        await self.demotion.keep(victims, set(elsewhere))
        self.withdrawn |= {b for b in victims.hashes if not self.tier.holds(b)}
        self.pool.free(victims)

    async def fill_disk(self):
        """With blocks that nobody used: there is no room left for another."""
        old = [bytes([200 + i]) * 16 for i in range(DISK_SLOTS)]
        self.put(old)
        await self.evict(DISK_SLOTS)
        assert self.tier.pool.match(old) == DISK_SLOTS


@pytest.fixture
def takes_all():
    return False


@pytest.fixture
async def world(tmp_path, clock, takes_all):
    async def leaving(hashes):
        """Nobody else is told here."""

    tier = SsdTier(
        SlotFiles(tmp_path, LAYOUT, NAMESPACE, DISK_SLOTS),
        NAMESPACE,
        LruOrder(),
        disk=disk_of(clock, takes_all=takes_all),
        leaving=leaving,
        clock=clock,
    )
    await tier.open()
    world = World(tier, clock)
    yield world
    world.pool.check()
    tier.pool.check()
    assert world.pool.counts().pinned == 0
    await tier.close()


async def test_while_there_is_room_everything_is_kept(world):
    world.put(UNUSED)

    await world.evict(3)

    assert world.tier.pool.match(UNUSED) == 3


async def test_a_full_disk_takes_what_was_used_and_nothing_else(world):
    await world.fill_disk()
    world.put(UNUSED)
    world.put(USED)
    world.pool.observe(USED)

    await world.evict(6)

    assert (world.tier.pool.match(USED), world.tier.pool.match(UNUSED)) == (3, 0)
    assert world.demotion.not_worth == 3


async def test_a_full_disk_is_not_written_for_what_another_node_holds(world):
    await world.fill_disk()
    world.put(USED)
    world.pool.observe(USED)

    await world.evict(3, elsewhere=USED)

    assert world.tier.pool.match(USED) == 0


@pytest.mark.parametrize("takes_all", [True])
async def test_a_full_disk_that_takes_all_takes_last_copies_of_what_nobody_used(world):
    await world.fill_disk()
    world.put(USED)
    world.put(UNUSED)

    await world.evict(6, elsewhere=USED)

    assert (world.tier.pool.match(USED), world.tier.pool.match(UNUSED)) == (0, 3)
    assert world.demotion.not_worth == 3


async def test_what_left_before_its_parents_is_written_though_they_leave_before_its_turn(world):
    other = bytes([9]) * 16
    world.put([other])
    world.put(UNUSED)

    # each chooses before the first write has ended: the leaf waits, then what lies before it
    await asyncio.gather(world.evict(1), world.evict(1), world.evict(2))

    assert world.tier.pool.match([other]) == 1
    assert world.tier.pool.match(UNUSED) == len(UNUSED)
    assert world.pool.free_slots == SLOTS


async def test_what_is_written_with_what_left_before_it_is_not_withdrawn_meanwhile(world):
    """Nobody wants the parents for themselves: another node has them."""
    await world.fill_disk()
    other = [bytes([9]) * 16]
    for chain in (other, USED):
        world.put(chain)
        world.pool.observe(chain)

    await asyncio.gather(world.evict(1), world.evict(1), world.evict(2, elsewhere=USED[:2]))

    assert world.tier.pool.match(USED) == len(USED)
    assert world.withdrawn.isdisjoint(USED)


async def test_what_lies_before_a_last_copy_is_written_with_it(world):
    """Only the end of the chain leaves memory; on disk it would be of no use alone."""
    await world.fill_disk()
    world.put(USED)
    world.pool.observe(USED)

    await world.evict(1, elsewhere=USED[:2])

    assert world.tier.pool.match(USED) == 3
    assert world.pool.match(USED) == 2
