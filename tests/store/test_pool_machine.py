"""Random histories of one pool against a plain model; `check()` after every step."""

from clocks import ManualClock
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, rule

from prefixfleet.store.eviction import LruOrder
from prefixfleet.store.pool import SlotPool

NUM_SLOTS = 7
LETTERS = "abc"

chains = st.text(LETTERS, min_size=1, max_size=6)


def hashes(text):
    """A prefix chain: block i is named by the first i + 1 letters, as a real hash is."""
    return [text[: i + 1].encode() for i in range(len(text))]


class PoolMachine(RuleBasedStateMachine):
    """The model: which blocks are resident, and the slots that must not change hands."""

    pins = Bundle("pins")
    reservations = Bundle("reservations")
    leaving = Bundle("leaving")
    quarantined = Bundle("quarantined")

    def __init__(self):
        super().__init__()
        self.clock = ManualClock()
        self.pool = SlotPool(NUM_SLOTS, LruOrder(), self.clock)
        self.resident = set()
        self.open_pins = []
        self.written = {}  # slots that a reservation or a quarantine may write to
        self.called = set()  # slots that are to go

    @rule(target=pins, text=chains)
    def pin(self, text):
        self.clock.advance(1)
        pin = self.pool.pin(hashes(text))
        assert list(pin.hashes) == self.leading(text)
        self.open_pins.append(pin)
        return pin

    @rule(pin=consumes(pins))
    def release(self, pin):
        pin.release()
        pin.release()
        self.open_pins.remove(pin)

    @rule(target=reservations, text=chains, cut=st.integers(0, 5))
    def reserve(self, text, cut):
        chain = hashes(text)
        parent = chain[cut - 1] if 0 < cut < len(chain) else b""
        reservation = self.pool.reserve(parent, chain[cut:] if parent else chain)
        for block, slot in zip(reservation.hashes, reservation.slots, strict=True):
            if slot >= 0:
                assert block not in self.resident
                assert slot not in self.in_use()
                assert slot not in self.called
                self.written[slot] = block
        return reservation

    @rule(reservation=reservations, index=st.integers(0, 5))
    def commit(self, reservation, index):
        if index >= len(reservation.hashes):
            return
        block, slot = reservation.hashes[index], reservation.slots[index]
        held = self.written.get(slot) == block and block not in self.resident
        parent_here = len(block) == 1 or block[:-1] in self.resident
        if reservation.commit(block):
            assert held
            assert parent_here
            self.resident.add(block)
        if slot >= 0 and self.written.get(slot) == block:
            del self.written[slot]

    @rule(reservation=consumes(reservations))
    def end_reservation(self, reservation):
        with reservation:
            pass
        for block, slot in zip(reservation.hashes, reservation.slots, strict=True):
            if self.written.get(slot) == block:
                del self.written[slot]

    @rule(target=quarantined, reservation=reservations, index=st.integers(0, 5))
    def quarantine(self, reservation, index):
        slot = -1
        if index < len(reservation.hashes):
            slot = reservation.quarantine(reservation.hashes[index])
        if slot >= 0:
            self.written[slot] = "quarantine"
        return [slot] if slot >= 0 else []

    @rule(slots=consumes(quarantined))
    def release_quarantine(self, slots):
        self.pool.release_quarantine(slots)
        for slot in slots:
            del self.written[slot]

    @rule(target=leaving, count=st.integers(0, 3))
    def evict(self, count):
        before = set(self.resident)
        victims = self.pool.choose_victims(count)
        pinned = {block for pin in self.open_pins for block in pin.hashes}
        for block in victims.hashes:
            assert block in self.resident
            self.resident.remove(block)
            assert not any(other[:-1] == block for other in self.resident), "children stay"
        assert not pinned & set(victims.hashes) & before
        return victims

    @rule(target=leaving, text=chains)
    def drop(self, text):
        block = text.encode()
        victims = self.pool.drop(block)
        expected = {b for b in self.resident if b.startswith(block)}
        assert set(victims.hashes) == (expected if block in self.resident else set())
        self.resident -= set(victims.hashes)
        return victims

    @rule(victims=consumes(leaving))
    def free(self, victims):
        self.pool.free(victims)

    @rule(slots=st.sets(st.integers(0, NUM_SLOTS - 1)))
    def shrink(self, slots):
        self.pool.shrink(slots)
        self.called |= slots

    @rule(slots=st.sets(st.integers(0, NUM_SLOTS - 1)))
    def grow(self, slots):
        self.pool.grow(slots)
        self.called -= slots

    @rule(target=leaving)
    def clear_what_was_called(self):
        """What is read there stays, and with it what comes before."""
        before = set(self.resident)
        standing = self.pool.standing_on(self.called)
        victims = self.pool.expel(standing)
        assert set(standing) <= before
        self.resident -= set(victims.hashes)
        pinned = {block for pin in self.open_pins for block in pin.hashes}
        assert not pinned & set(victims.hashes)
        return victims

    @invariant()
    def what_is_absent_was_called_and_is_used_by_nobody(self):
        absent = {s for s in range(NUM_SLOTS) if self.pool.absent(range(s, s + 1))}
        assert absent <= self.called
        assert not absent & self.in_use()
        assert self.pool.capacity == NUM_SLOTS - len(absent)
        counts = self.pool.counts()
        states = (counts.free, counts.resident, counts.reserved, counts.leaving)
        assert sum(states) + counts.quarantined == self.pool.capacity

    @invariant()
    def books_balance(self):
        self.pool.check()
        found = [block for block, _ in self.pool.resident()]
        assert set(found) == self.resident
        assert len(found) == len(self.resident)
        for position, block in enumerate(found):
            assert len(block) == 1 or block[:-1] in found[:position]
        assert self.pool.counts().pinned == len({s for p in self.open_pins for s in p.slots})

    def teardown(self):
        for pin in self.open_pins:
            assert not set(pin.slots) & set(self.written)

    def in_use(self):
        return {slot for pin in self.open_pins for slot in pin.slots} | set(self.written)

    def leading(self, text):
        run = []
        for block in hashes(text):
            if block not in self.resident:
                break
            run.append(block)
        return run


TestPool = PoolMachine.TestCase
TestPool.settings = settings(max_examples=150, stateful_step_count=40)
