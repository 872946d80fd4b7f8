"""Reads from disk for requests: what has come when a request's time is over is used."""

import asyncio
import mmap
import threading
import time

import pytest
from disks import disk_of
from eventually import until

from prefixfleet.cluster.promotion import BATCH_BLOCKS, Promotion
from prefixfleet.store.eviction import LruOrder
from prefixfleet.store.pool import SlotPool
from prefixfleet.store.slot import SlotLayout, seal, verify
from prefixfleet.store.slot_files import SlotFiles
from prefixfleet.store.ssd import DiskWrite, SsdTier

NAMESPACE = b"n" * 16
LAYOUT = SlotLayout(payload_bytes=4000)
SLOTS = 8 * BATCH_BLOCKS
LONG = [i.to_bytes(2, "big") * 8 for i in range(1, 3 * BATCH_BLOCKS + 1)]
SHORT = [i.to_bytes(2, "big") * 8 for i in range(1000, 1004)]


class GatedFiles(SlotFiles):
    """The real files on a disk that reads so many slots and then none, until it is opened."""

    def __init__(self, *arguments):
        super().__init__(*arguments)
        self.gate = threading.Semaphore(0)

    def open(self, reads=SLOTS):
        self.gate.release(reads)

    def read(self, slot, target):
        assert self.gate.acquire(timeout=60)
        super().read(slot, target)


class World:
    """A pool, empty, over a disk that holds both chains."""

    def __init__(self, folder):
        async def leaving(hashes):
            """Nobody else is told here."""

        async def make_room(hashes):
            return len(hashes)

        clock = time.monotonic
        self.files = GatedFiles(folder, LAYOUT, NAMESPACE, SLOTS)
        self.tier = SsdTier(
            self.files,
            NAMESPACE,
            LruOrder(),
            disk=disk_of(clock),
            leaving=leaving,
            clock=clock,
        )
        self.pool = SlotPool(SLOTS, LruOrder(), clock)
        self._memory = memoryview(mmap.mmap(-1, SLOTS * LAYOUT.slot_bytes))
        self.promotion = Promotion(
            self.pool, self.tier, self.slot, make_room=make_room, clock=clock
        )

    def slot(self, number):
        return self._memory[number * LAYOUT.slot_bytes : (number + 1) * LAYOUT.slot_bytes]

    async def put_on_disk(self, chain):
        page = memoryview(mmap.mmap(-1, LAYOUT.slot_bytes))
        for parent, block in zip([b"", *chain], chain, strict=False):
            seal(page, LAYOUT, NAMESPACE, block)
            assert await self.tier.store([DiskWrite(block, parent, page)]) == [block]

    def bring(self, chain, within_s=60.0):
        return asyncio.create_task(self.promotion.bring(chain, time.monotonic() + within_s))

    def check(self, chain):
        with self.pool.pin(chain) as pin:
            for block, slot in zip(pin.hashes, pin.slots, strict=True):
                verify(self.slot(slot), LAYOUT, NAMESPACE, block)
            return len(pin.hashes)


@pytest.fixture
async def world(tmp_path):
    world = World(tmp_path)
    await world.tier.open()
    for chain in (LONG, SHORT):
        await world.put_on_disk(chain)
    yield world
    world.files.open()
    await world.promotion.close()
    world.pool.check()
    assert world.pool.counts().reserved == 0
    await world.tier.close()


async def test_what_was_read_by_the_deadline_is_there_and_the_rest_follows(world):
    bringing = world.bring(LONG)
    world.files.open(BATCH_BLOCKS)
    await until(lambda: world.check(LONG) == BATCH_BLOCKS)

    assert not bringing.done()
    world.files.open()
    await bringing

    assert world.check(LONG) == len(LONG)
    assert world.promotion.promoted_blocks == len(LONG)


async def test_a_request_whose_time_is_over_does_not_wait_for_the_whole_read(world):
    world.files.open(BATCH_BLOCKS)

    await world.bring(LONG, within_s=0.05)  # the disk has stopped: it would wait for ever

    assert world.check(LONG) in (0, BATCH_BLOCKS)


async def test_a_short_read_does_not_wait_for_the_end_of_a_long_one(world):
    long = world.bring(LONG)
    await until(lambda: world.pool.counts().reserved == len(LONG))
    short = world.bring(SHORT)
    await until(lambda: world.pool.counts().reserved == len(LONG) + len(SHORT))

    world.files.open(2 * BATCH_BLOCKS)
    await until(lambda: world.check(SHORT) == len(SHORT))

    await short
    assert not long.done()
    world.files.open()
    await long


async def test_a_spoiled_block_ends_the_read_before_it(world):
    world.files.open()
    at = BATCH_BLOCKS + 3
    with world.tier.pool.pin(LONG) as pin:
        slot = pin.slots[at]
    world.files._bucket(0).write_slots(slot, [memoryview(mmap.mmap(-1, LAYOUT.slot_bytes))])

    await world.bring(LONG)

    assert world.check(LONG) == at
    assert world.tier.pool.match(LONG) == at
