"""One disk for several namespaces: the cap holds for all together, and the oldest goes first."""

import asyncio
import mmap
import random

import pytest
from disks import disk_of

from prefixfleet.store import disk_space
from prefixfleet.store.disk_space import RETRY_S, DiskPart, giver_of
from prefixfleet.store.eviction import LruOrder
from prefixfleet.store.kept_files import KeptFiles, files_in
from prefixfleet.store.slab_shares import LEAST_AGE_S, OLDER
from prefixfleet.store.slot import SlotLayout, seal, verify
from prefixfleet.store.slot_files import LEAST_BUCKETS, SlotFiles, bucket_size
from prefixfleet.store.slot_regions import oldest
from prefixfleet.store.ssd import DiskWrite, SsdTier
from prefixfleet.store.wear import WearBudget

LAYOUTS = {b"s" * 16: SlotLayout(payload_bytes=4_000), b"l" * 16: SlotLayout(payload_bytes=12_000)}
SMALL, LARGE = LAYOUTS
FILE_BYTES = 1 << 15
CAP_BYTES = 10 * (FILE_BYTES + 8192)


def part(name, files=4, idle_s=100.0):
    return DiskPart(name, files, idle_s)


@pytest.mark.parametrize(
    ("taker", "others", "giver"),
    [
        (part("a"), [], None),
        (part("a"), [part("b")], None),  # as old: each keeps what it has
        (part("a"), [part("b", idle_s=OLDER * 100.0)], None),
        (part("a"), [part("b", idle_s=OLDER * 100.0 + 1)], "b"),
        (part("a"), [part("b", idle_s=300.0), part("c", idle_s=400.0)], "c"),
        (part("a"), [part("b", idle_s=300.0), part("c", files=0, idle_s=400.0)], "b"),
        (part("a", idle_s=0.0), [part("b", idle_s=LEAST_AGE_S)], None),
        (part("a", files=0, idle_s=0.0), [part("b", idle_s=1.0), part("c", idle_s=2.0)], "c"),
        (part("a", files=0, idle_s=0.0), [part("b", files=1, idle_s=1.0)], None),  # its last one
        (part("a", files=0, idle_s=0.0), [part("b", files=1, idle_s=100.0)], "b"),
    ],
)
def test_the_oldest_gives_if_it_is_clearly_older(taker, others, giver):
    assert giver_of(taker, others) == giver


def test_two_that_write_alike_take_from_nobody_in_turn():
    """Whoever gave a file has younger blocks than before, and gets it back from nobody."""
    old, new = part("old", idle_s=201.0), part("new")
    assert giver_of(new, [old]) == "old"
    assert giver_of(old, [new]) is None


@pytest.mark.parametrize("room", [1 << 20, 10_000_000, 1 << 30, 16 << 30, 500_000_000_000])
def test_there_are_files_for_many_namespaces(room):
    assert room / bucket_size(room) >= LEAST_BUCKETS
    assert bucket_size(room) == bucket_size(room - 1) or room == 1 << 30 or room == 1 << 20


class Disk:
    """Two namespaces on one disk of ten small files, and what was stored of each."""

    def __init__(self, folder, clock, budget=None):
        self.folder = folder
        self.clock = clock
        self.shared = disk_of(clock, cap_bytes=CAP_BYTES, budget=budget)
        self.space = self.shared.space
        self.tiers = {}
        self.left = {name: set() for name in LAYOUTS}

    async def open(self, name):
        async def leaving(hashes):
            self.left[name].update(hashes)

        layout = LAYOUTS[name]
        files = SlotFiles(self.folder / name.hex(), layout, name, 10_000, FILE_BYTES)
        files.num_slots = CAP_BYTES // files.bucket_bytes * files.bucket_slots
        self.tiers[name] = SsdTier(
            files, name, LruOrder(), disk=self.shared, leaving=leaving, clock=self.clock
        )
        return await self.tiers[name].open()

    async def close(self, name):
        tier = self.tiers.pop(name)
        tier.pool.check()
        del self.space.holders[name]
        await tier.close()

    def keep(self, name):
        files = files_in(self.folder / name.hex())
        self.space.holders[name] = KeptFiles(files, self.shared.threads, self.clock)

    async def store(self, name, chain):
        self.clock.advance(1.0)
        slots = [
            DiskWrite(b, p, sealed(name, b)) for p, b in zip([b"", *chain], chain, strict=False)
        ]
        stored = await self.tiers[name].store(slots)
        self.left[name] -= set(stored)
        on_disk = sum(path.stat().st_size for path in self.folder.glob("*/bucket-*"))
        assert on_disk <= self.space.held_bytes <= CAP_BYTES
        return len(stored)

    async def check(self, name, chain):
        """Leading blocks that are read, each proved; none that the index was told is gone."""
        targets = [page(name) for _ in chain]
        count = await self.tiers[name].load(chain, targets)
        assert not self.left[name] & set(chain[:count])
        for block, target in zip(chain[:count], targets, strict=False):
            verify(target, LAYOUTS[name], name, block)
            assert LAYOUTS[name].payload(target) == payload_of(name, block)
        return count


def page(name):
    return memoryview(mmap.mmap(-1, LAYOUTS[name].slot_bytes))


def payload_of(name, block):
    return random.Random(block).randbytes(LAYOUTS[name].payload_bytes)


def sealed(name, block):
    slot = page(name)
    LAYOUTS[name].payload(slot)[:] = payload_of(name, block)
    seal(slot, LAYOUTS[name], name, block)
    return slot


def chain_of(number, length=4):
    return [bytes([number, place + 1]) * 8 for place in range(length)]


@pytest.fixture
async def disk(tmp_path, clock):
    disk = Disk(tmp_path, clock)
    yield disk
    for name in list(disk.tiers):
        await disk.close(name)
    disk.shared.threads.close()


async def test_whoever_writes_has_the_whole_disk_until_another_does(disk):
    await disk.open(SMALL)
    await disk.open(LARGE)
    for number in range(40):
        assert await disk.store(SMALL, chain_of(number)) == 4
    assert disk.space.holders[SMALL].files == 10
    assert (disk.tiers[SMALL].roomy, disk.tiers[LARGE].roomy) == (False, True)

    for number in range(200, 203):
        assert await disk.store(LARGE, chain_of(number)) == 4

    assert disk.space.given_files == 10 - disk.space.holders[SMALL].files == 5
    kept = [await disk.check(SMALL, chain_of(number)) for number in range(40)]
    assert kept == [0] * 30 + [4] * 10  # two chains a file
    assert [await disk.check(LARGE, chain_of(number)) for number in range(200, 203)] == [4] * 3


async def test_the_oldest_of_many_files_is_found_while_others_have_their_turn(disk):
    await disk.open(SMALL)
    for number in range(20):
        await disk.store(SMALL, chain_of(number))
    tier, turns = disk.tiers[SMALL], 0
    files = {number: tier.space._slots(number) for number in range(tier.space.files)}

    async def others():
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    beside = asyncio.create_task(others())
    assert await oldest(tier.pool, files) == 0
    beside.cancel()
    assert turns >= len(files) == 10


async def test_what_is_younger_is_not_taken(disk):
    await disk.open(SMALL)
    await disk.open(LARGE)
    for number in range(20):
        await disk.store(SMALL, chain_of(number))
        await disk.store(LARGE, chain_of(100 + number))
    assert not disk.space.has_room(FILE_BYTES)
    given = disk.space.given_files

    for number in range(20, 60):
        await disk.store(SMALL, chain_of(number))
        await disk.store(LARGE, chain_of(100 + number))

    assert disk.space.given_files == given
    assert not any(disk.space.gives_to(name) for name in LAYOUTS)
    assert all(holder.files >= 2 for holder in disk.space.holders.values())
    assert await disk.check(SMALL, chain_of(59)) == 4
    assert await disk.check(LARGE, chain_of(159)) == 4


async def test_files_that_nobody_opened_count_and_go_when_they_are_oldest(disk):
    await disk.open(SMALL)
    for number in range(20):
        await disk.store(SMALL, chain_of(number))
    await disk.close(SMALL)
    disk.keep(SMALL)
    held = disk.space.held_bytes
    assert held > 0

    await disk.open(LARGE)
    number = 100
    while disk.space.has_room(FILE_BYTES):
        await disk.store(LARGE, chain_of(number))
        number += 1
    assert disk.space.holders[SMALL].held_bytes == held

    disk.clock.advance(1000.0)
    for more in range(number, number + 30):
        assert await disk.store(LARGE, chain_of(more)) == 4
    assert SMALL not in disk.space.holders


@pytest.mark.parametrize("more", [False, True])
async def test_who_never_came_and_gave_its_last_file_leaves_nothing(disk, more):
    await disk.open(SMALL)
    await disk.store(SMALL, chain_of(1))
    await disk.close(SMALL)
    disk.keep(SMALL)
    folder = disk.folder / SMALL.hex()
    if more:
        (folder / "somebody's").touch()
    await disk.open(LARGE)
    disk.clock.advance(1000.0)
    number = 100
    while disk.space.given_files == 0:
        assert await disk.store(LARGE, chain_of(number)) == 4
        number += 1

    assert list(disk.space.holders) == [LARGE]
    assert folder.exists() == more
    for later in range(number, number + 30):
        assert await disk.store(LARGE, chain_of(later)) == 4
    assert await disk.open(SMALL) == 0
    assert await disk.store(SMALL, chain_of(2)) == 4


async def test_what_was_kept_is_recovered_by_its_own_namespace(disk):
    await disk.open(SMALL)
    for number in range(8):
        await disk.store(SMALL, chain_of(number))
    await disk.close(SMALL)
    disk.keep(SMALL)
    await disk.open(LARGE)
    await disk.store(LARGE, chain_of(100))

    assert await disk.open(SMALL) == 32

    assert [await disk.check(SMALL, chain_of(number)) for number in range(8)] == [4] * 8
    assert await disk.check(LARGE, chain_of(100)) == 4


async def test_a_file_that_is_read_stays_and_is_not_asked_for_again_soon(disk):
    await disk.open(SMALL)
    await disk.open(LARGE)
    for number in range(40):
        await disk.store(SMALL, chain_of(number))
    pool = disk.tiers[SMALL].pool
    resident = [block for block, _ in pool.resident()]
    pins = [pool.pin([block], used=False) for block in resident]
    disk.clock.advance(1000.0)

    assert await disk.store(LARGE, chain_of(100)) == 0  # nothing of its own to evict either
    assert disk.space.given_files == 0
    for pin in pins:
        pin.release()
    assert [block for block, _ in pool.resident()] == resident
    assert await disk.store(LARGE, chain_of(100)) == 0
    disk.clock.advance(RETRY_S)
    assert await disk.store(LARGE, chain_of(100)) == 4


async def test_a_file_that_cannot_be_deleted_stays_and_counts(disk, monkeypatch, caplog):
    await disk.open(SMALL)
    await disk.open(LARGE)
    for number in range(40):
        await disk.store(SMALL, chain_of(number))

    def refuse(number):
        raise PermissionError(f"bucket {number} stays")

    monkeypatch.setattr(disk.tiers[SMALL]._files, "delete", refuse)
    assert await disk.store(LARGE, chain_of(100)) == 0

    assert "stays" in caplog.text
    assert disk.space.holders[SMALL].files == 10
    assert await disk.store(SMALL, chain_of(50)) == 4


async def test_one_wear_budget_is_for_all(tmp_path, clock):
    budget = WearBudget(None, clock)
    disk = Disk(tmp_path, clock, budget)
    small, large = (LAYOUTS[name].slot_bytes for name in LAYOUTS)
    disk.shared = disk_of(
        clock, cap_bytes=CAP_BYTES, budget=WearBudget(24 * (2 * small + large), clock)
    )
    disk.space = disk.shared.space
    await disk.open(SMALL)
    await disk.open(LARGE)

    assert await disk.store(SMALL, chain_of(1)[:2]) == 2
    assert await disk.store(LARGE, chain_of(2)) == 1
    assert await disk.store(SMALL, chain_of(3)) == 0
    assert "wear" in disk.tiers[SMALL].gate.degraded
    for name in LAYOUTS:
        await disk.close(name)
    disk.shared.threads.close()


@pytest.mark.parametrize("seed", range(4))
async def test_any_order_of_writes_and_restarts_keeps_cap_books_and_bytes(disk, seed, monkeypatch):
    monkeypatch.setattr(disk_space, "LEAST_AGE_S", 2.0)
    draw = random.Random(seed)
    chains = {name: [] for name in LAYOUTS}
    for _ in range(60):
        name = draw.choice((SMALL, LARGE))
        if name not in disk.tiers:
            if draw.random() < 0.5:
                await disk.open(name)
            continue
        if draw.random() < 0.05:
            await disk.close(name)
            disk.keep(name)
            continue
        chain = chain_of(draw.randrange(250), draw.randrange(1, 12))
        await disk.store(name, chain)
        chains[name].append(chain)
        disk.tiers[name].pool.check()
        await disk.check(name, draw.choice(chains[name]))
    assert all(chains.values())
