"""What a chaos run blames for an error."""

from chaos_client import STREAM_CUT, Ended
from chaos_plan import Done, Fault
from chaos_verdict import GRACE_S, recoveries, spread


def fault(began, ended, kind="kill engine"):
    return Done(Fault(kind, "e0", 1.0, 0.1), began, ended)


def error(began, ended, how="status 502"):
    return Ended(began, ended, 0, how)


def test_an_error_is_blamed_on_the_latest_fault_that_clients_notice():
    done = [fault(0, 2), fault(5, 6), fault(7, 8, "slow peer")]

    felt, unexplained = recoveries(done, [error(1, 1.5), error(8, 9)])

    assert felt == {0: 1.5, 1: 4.0, 2: 0.0}
    assert unexplained == []


def test_an_error_long_after_a_fault_or_before_it_has_no_cause():
    early, late = error(0, 1), error(5 + GRACE_S, 6 + GRACE_S)

    assert recoveries([fault(2, 4)], [early, late]) == ({0: 0.0}, [early, late])


def test_nothing_excuses_a_wrong_answer_or_a_hung_request():
    bad = [error(1, 2, "wrong"), error(1, 2, "hung")]

    assert recoveries([fault(0, 3)], bad)[1] == bad


def test_a_broken_stream_needs_a_fault_that_breaks_streams():
    cut = error(1, 2, STREAM_CUT)

    assert recoveries([fault(0, 3, "freeze engine")], [cut])[1] == [cut]
    assert recoveries([fault(0, 3, "kill router")], [cut])[1] == []


def test_an_error_that_says_nothing_is_never_excused():
    bad = [error(1, 2, "unclear: 502 without an error object")]

    assert recoveries([fault(0, 3)], bad)[1] == bad


def test_spread():
    assert spread([]) == {"p50": 0.0, "max": 0.0}
    assert spread([1.0, 4.0, 2.0]) == {"p50": 2.0, "max": 4.0}
