"""Why a disk tier does not write for a while."""

from prefixfleet.store.wear import DAY_S, SHOWN_S, WearBudget
from prefixfleet.store.write_gate import RETRY_S, WORN, WriteGate

FULL = OSError(28, "No space left on device")


def test_after_a_failure_the_disk_is_tried_again_when_it_had_time(clock):
    gate = WriteGate(WearBudget(None, clock), clock)
    gate.failed(FULL)
    clock.advance(RETRY_S - 0.1)
    assert not gate.open
    assert "No space left" in gate.degraded

    clock.advance(0.1)

    assert (gate.open, gate.degraded) == (True, "")


def test_a_disk_that_fails_again_and_again_is_told_once_and_so_is_its_end(clock, caplog):
    gate = WriteGate(WearBudget(None, clock), clock)
    for _ in range(3):
        gate.failed(FULL)
        clock.advance(RETRY_S)
    gate.wrote()
    gate.wrote()

    assert [record.levelname for record in caplog.records] == ["ERROR", "WARNING"]


def test_what_nobody_asked_for_leaves_half_of_the_budget_to_what_was(clock):
    budget = WearBudget(int(DAY_S), clock)  # a byte a second, an hour of it
    all_of_it, reused = WriteGate(budget, clock, takes_all=True), WriteGate(budget, clock)
    assert (all_of_it.takes_unused, reused.takes_unused) == (True, False)

    assert budget.take(1000)
    assert all_of_it.takes_unused
    assert budget.take(1000)
    assert not all_of_it.takes_unused


def test_a_used_up_budget_refuses_writes_and_shuts_nothing(clock, caplog):
    """It fills all the time: some of the next batch may be written."""
    gate = WriteGate(WearBudget(int(DAY_S), clock), clock)  # a byte a second, an hour of it

    assert [gate.affords(1000, 4), gate.affords(1000, 5)] == [3, 3]

    assert (gate.open, gate.degraded) == (True, WORN)
    assert len(caplog.records) == 1
    clock.advance(SHOWN_S)
    assert gate.degraded == ""
