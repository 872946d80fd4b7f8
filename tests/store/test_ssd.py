"""The disk tier: what it says it holds it can give back, and a sick disk never hurts the node."""

import asyncio
import errno
import mmap
import threading

import pytest
from disks import disk_of

from prefixfleet.store import disk_threads
from prefixfleet.store.eviction import LruOrder
from prefixfleet.store.slot import SlotLayout, seal, verify
from prefixfleet.store.slot_files import SlotFiles
from prefixfleet.store.ssd import DiskWrite, SsdTier
from prefixfleet.store.wear import DAY_S, SHOWN_S, WearBudget
from prefixfleet.store.wear_file import WearFile
from prefixfleet.store.write_gate import RETRY_S

NAMESPACE = b"n" * 16
LAYOUT = SlotLayout(payload_bytes=4000)
CHAIN = [bytes([n + 1]) * 16 for n in range(12)]
OTHER = b"o" * 16


def slot_memory():
    return memoryview(mmap.mmap(-1, LAYOUT.slot_bytes))


def sealed(block):
    slot = slot_memory()
    LAYOUT.payload(slot)[:] = block[:1] * LAYOUT.payload_bytes
    seal(slot, LAYOUT, NAMESPACE, block)
    return slot


def writes(chain, first=0):
    return [
        DiskWrite(block, CHAIN[i - 1] if i else b"", sealed(block))
        for i, block in enumerate(chain, first)
    ]


class Clock:
    def __init__(self):
        self.now = 1000.0

    def __call__(self):
        return self.now


class FailingFiles(SlotFiles):
    """The real files on a disk that can be told to fail."""

    broken: Exception | None = None

    def write(self, blocks):
        if self.broken:
            raise self.broken
        super().write(blocks)


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
async def make_tier(tmp_path, clock):
    """Opens tiers over one folder; closes them at the end."""
    made = []

    async def make(*, num_slots=8, bytes_per_day=None, least_bytes=0, kept=False):
        file = WearFile(tmp_path / "wear", clock) if kept else None
        left_bytes = file.left_bytes(bytes_per_day) if file else None

        async def leaving(hashes):
            tier.gone.extend(hashes)

        tier = SsdTier(
            FailingFiles(tmp_path, LAYOUT, NAMESPACE, num_slots),
            NAMESPACE,
            LruOrder(),
            disk=disk_of(
                clock,
                budget=WearBudget(
                    bytes_per_day, clock, least_bytes=least_bytes, left_bytes=left_bytes
                ),
                wear_file=file,
            ),
            leaving=leaving,
            clock=clock,
        )
        tier.gone = []
        await tier.open()
        made.append(tier)
        return tier

    yield make
    for tier in made:
        tier.pool.check()
        await tier.close()


async def test_blocks_are_read_back_verified(make_tier):
    tier = await make_tier()

    assert await tier.store(writes(CHAIN[:3])) == CHAIN[:3]

    targets = [slot_memory() for _ in CHAIN[:3]]
    assert await tier.load(CHAIN[:3], targets) == 3
    for block, target in zip(CHAIN, targets, strict=False):
        verify(target, LAYOUT, NAMESPACE, block)


async def test_a_restart_brings_the_blocks_back(make_tier):
    await (await make_tier()).store(writes(CHAIN[:4]))

    again = await make_tier()

    assert again.pool.match(CHAIN) == 4
    assert [block for block, _ in again.pool.resident()] == CHAIN[:4]


async def test_a_block_without_its_parent_is_not_kept(make_tier):
    """The chain on disk stays unbroken, whatever was left out before."""
    tier = await make_tier()

    assert await tier.store(writes(CHAIN[2:3], first=2)) == []


async def test_a_full_tier_evicts_leaves_and_says_so(make_tier):
    tier = await make_tier(num_slots=4)
    await tier.store(writes(CHAIN[:4]))

    other = bytes([99]) * 16
    await tier.store([DiskWrite(other, b"", sealed(other))])

    assert tier.gone == [CHAIN[3]]
    assert tier.pool.match(CHAIN) == 3
    assert tier.holds(other)


async def test_the_parent_of_what_is_written_is_not_evicted_for_it(make_tier):
    tier = await make_tier(num_slots=3)
    await tier.store(writes(CHAIN[:2]))
    other = bytes([99]) * 16
    await tier.store([DiskWrite(other, b"", sealed(other))])

    assert await tier.store(writes(CHAIN[2:3], first=2)) == CHAIN[2:3]
    assert tier.pool.match(CHAIN) == 3
    assert tier.gone == [other]


async def test_a_corrupt_block_is_a_miss_and_leaves_with_its_suffix(make_tier, tmp_path):
    tier = await make_tier()
    await tier.store(writes(CHAIN[:4]))
    (path,) = tmp_path.iterdir()
    data = bytearray(path.read_bytes())
    start = data.index(CHAIN[1][:1] * LAYOUT.payload_bytes)
    data[start + 100] ^= 1
    path.write_bytes(data)

    targets = [slot_memory() for _ in range(4)]
    loaded = await tier.load(CHAIN[:4], targets)

    assert loaded == 1
    assert tier.pool.match(CHAIN) == 1
    assert tier.gone == CHAIN[1:4][::-1]
    assert tier.stats()["corrupt"] == 1


async def test_a_full_disk_stops_the_writes_for_a_while_and_reads_go_on(make_tier, clock):
    tier = await make_tier()
    await tier.store(writes(CHAIN[:2]))
    tier._files.broken = OSError(errno.ENOSPC, "No space left on device")

    assert await tier.store(writes(CHAIN[2:4], first=2)) == []
    assert "No space" in tier.stats()["degraded"]
    assert await tier.load(CHAIN[:2], [slot_memory(), slot_memory()]) == 2
    tier._files.broken = None
    assert await tier.store(writes(CHAIN[2:4], first=2)) == []
    clock.now += RETRY_S
    assert await tier.store(writes(CHAIN[2:4], first=2)) == CHAIN[2:4]
    assert tier.stats()["degraded"] == ""


async def test_a_write_that_fails_in_an_unknown_way_is_told_and_holds_no_slot(make_tier):
    tier = await make_tier(num_slots=4)
    await tier.store(writes(CHAIN[:1]))
    tier._files.broken = MemoryError("no room to encrypt")

    with pytest.raises(MemoryError):
        await tier.store(writes(CHAIN[1:4], first=1))
    tier._files.broken = None

    assert await tier.store(writes(CHAIN[1:4], first=1)) == CHAIN[1:4]


async def test_writes_stop_at_the_wear_budget_and_go_on_with_time(make_tier, clock):
    """The bucket holds an hour's worth: here two slots."""
    tier = await make_tier(bytes_per_day=48 * LAYOUT.slot_bytes)

    assert await tier.store(writes(CHAIN[:4])) == CHAIN[:2]
    assert tier.stats()["refused_wear"] == 2
    clock.now += DAY_S / 48
    assert await tier.store(writes(CHAIN[2:3], first=2)) == CHAIN[2:3]


async def test_a_used_up_budget_is_told_for_a_while_and_once_logged(make_tier, clock, caplog):
    tier = await make_tier(bytes_per_day=48 * LAYOUT.slot_bytes)
    assert (tier.gate.degraded, tier.stats()["wear_left"]) == ("", 1.0)

    for _ in range(3):
        await tier.store(writes(CHAIN[:4]))

    assert "PREFIXFLEET_NODE_SSD_WRITE_BYTES_PER_DAY" in tier.gate.degraded
    assert caplog.text.count("wear budget") == 1
    assert tier.gate.open
    assert tier.stats()["wear_left"] == 0.0
    clock.now += SHOWN_S
    assert tier.gate.degraded == ""


async def test_nothing_leaves_the_disk_for_what_may_not_be_written(make_tier):
    tier = await make_tier(num_slots=2, bytes_per_day=48 * LAYOUT.slot_bytes)
    assert await tier.store(writes(CHAIN[:2])) == CHAIN[:2]

    assert await tier.store(writes([OTHER])) == []

    assert tier.gone == []
    assert tier.pool.match(CHAIN) == 2


async def test_a_restart_gives_no_new_budget(make_tier, clock):
    share = {"bytes_per_day": 48 * LAYOUT.slot_bytes, "kept": True}
    written = 0
    for _ in range(10):
        tier = await make_tier(**share)
        written += len(await tier.store(writes(CHAIN[written:][:4], first=written)))
    assert written == 2

    clock.now += DAY_S / 48
    tier = await make_tier(**share)

    assert await tier.store(writes(CHAIN[2:4], first=2)) == CHAIN[2:3]


async def test_a_share_smaller_than_a_slot_still_writes_one_now_and_then(make_tier, clock):
    share = {"bytes_per_day": LAYOUT.slot_bytes, "least_bytes": LAYOUT.slot_bytes, "kept": True}
    tier = await make_tier(**share)

    assert await tier.store(writes(CHAIN[:2])) == CHAIN[:1]
    assert await tier.store(writes(CHAIN[1:2], first=1)) == []
    clock.now += DAY_S + 1.0
    assert await tier.store(writes(CHAIN[1:3], first=1)) == CHAIN[1:2]


@pytest.mark.parametrize(
    "broken",
    [
        b"", b"junk", b"\xff" * 500, b"prefixfleet wear 1 99999999 0.000 00000000\n",
        b"prefixfleet wear 1 99999999\n",
    ],
)  # fmt: skip
async def test_a_budget_that_cannot_be_read_counts_as_used_up_for_an_hour(
    make_tier, clock, tmp_path, caplog, broken
):
    (tmp_path / "wear").write_bytes(broken)
    tier = await make_tier(bytes_per_day=48 * LAYOUT.slot_bytes, kept=True)

    assert await tier.store(writes(CHAIN[:2])) == []
    assert str(tmp_path / "wear") in caplog.text
    clock.now += DAY_S / 24 + 1.0
    assert await tier.store(writes(CHAIN[:2])) == CHAIN[:2]


def test_a_clock_that_was_set_back_gives_no_credit(tmp_path, clock):
    file = WearFile(tmp_path / "wear", clock)
    file.write(1_000)
    clock.now -= DAY_S

    assert file.left_bytes(48_000) == 1_000


async def test_where_the_budget_cannot_be_kept_nothing_is_written(make_tier, tmp_path):
    tier = await make_tier(bytes_per_day=48 * LAYOUT.slot_bytes, kept=True)
    (tmp_path / "wear").mkdir()
    (tmp_path / "wear" / "in the way").touch()

    assert await tier.store(writes(CHAIN[:1])) == []

    assert "wear" in tier.gate.degraded
    assert not tier.gate.open


async def test_reads_and_writes_at_once_keep_the_books(make_tier):
    tier = await make_tier(num_slots=6)
    await tier.store(writes(CHAIN[:3]))

    targets = [slot_memory() for _ in range(3)]
    results = await asyncio.gather(
        tier.load(CHAIN[:3], targets),
        tier.store(writes(CHAIN[3:6], first=3)),
        tier.load(CHAIN[:3], [slot_memory() for _ in range(3)]),
        tier.store([DiskWrite(b"x" * 16, b"", sealed(b"x" * 16))]),
    )

    tier.pool.check()
    assert results[0] == results[2] == 3
    for block, target in zip(CHAIN, targets, strict=False):
        verify(target, LAYOUT, NAMESPACE, block)


class HungFiles(SlotFiles):
    """The real files on a disk that does not answer until it may."""

    may_answer: threading.Event

    def write(self, blocks):
        self.may_answer.wait(120)
        super().write(blocks)

    def recover(self):
        self.may_answer.wait(120)
        return super().recover()


async def test_a_disk_that_does_not_answer_holds_up_no_end(tmp_path, clock, monkeypatch, caplog):
    monkeypatch.setattr(disk_threads, "CLOSE_S", 0.05)
    files = HungFiles(tmp_path, LAYOUT, NAMESPACE, num_slots=4)
    files.may_answer = threading.Event()
    files.may_answer.set()
    tier = SsdTier(
        files,
        NAMESPACE,
        LruOrder(),
        disk=disk_of(clock),
        leaving=lambda _: asyncio.sleep(0),
        clock=clock,
    )
    await tier.open()
    files.may_answer.clear()
    storing = asyncio.create_task(tier.store(writes(CHAIN[:1])))
    await asyncio.sleep(0)

    await tier.close()

    assert "left open" in caplog.text
    files.may_answer.set()
    assert await storing == CHAIN[:1]


async def test_a_tier_that_nobody_waits_for_any_more_leaves_no_file_open(
    make_tier, tmp_path, clock
):
    await (await make_tier()).store(writes(CHAIN[:2]))
    files = HungFiles(tmp_path, LAYOUT, NAMESPACE, num_slots=8)
    files.may_answer = threading.Event()
    disk = disk_of(clock)
    tier = SsdTier(
        files, NAMESPACE, LruOrder(), disk=disk, leaving=lambda _: asyncio.sleep(0), clock=clock
    )
    opening = asyncio.create_task(tier.open())
    await asyncio.sleep(0)

    opening.cancel()
    await asyncio.wait({opening})
    files.may_answer.set()
    await disk.threads.in_order(int)

    assert opening.cancelled()
    assert files.buckets == []
    with pytest.raises(OSError, match="closed"):
        files.delete(0)
