"""Who goes next: short before long, nobody for ever, nobody to a worker that is not its best."""

from hypothesis import given
from hypothesis import strategies as st

from prefixfleet.router.decision import Decision
from prefixfleet.router.waiting import (
    MAX_CONSIDERED,
    Waiting,
    expected_wait,
    most_urgent,
    next_by_wish,
    next_to_go,
    response_ratio,
)


def unheard(worker, seconds):
    """For a queue in which nobody else is judged by it."""


def waiting(arrived_s, prefill_s):
    return Waiting(arrived_s, round(prefill_s * 1000), prefill_s)


def decision(worker, prefill_s=1.0, queue_s=0.0):
    return Decision(
        worker=worker, hit_blocks=0, pull_blocks=0, source=None,
        queue_s=queue_s, pull_s=0.0, prefill_s=prefill_s,
    )  # fmt: skip


def test_a_short_request_passes_a_long_one_that_came_a_little_earlier():
    long, short = waiting(0.0, 20.0), waiting(1.0, 0.5)

    assert most_urgent([long, short], now=3.0) == [short, long]


def test_a_long_request_is_not_passed_for_ever():
    long = waiting(0.0, 20.0)
    for now in range(1, 200):
        fresh = waiting(now - 1.0, 1.0)
        if most_urgent([long, fresh], now=float(now))[0] is long:
            break

    assert now < 25


def test_equals_go_in_order_of_arrival():
    first, second = waiting(0.0, 1.0), waiting(0.0, 1.0)

    assert most_urgent([first, second], now=0.0) == [first, second]


def test_a_request_waits_for_its_best_worker_while_another_one_goes():
    picky, easy = waiting(0.0, 0.1), waiting(0.0, 5.0)
    best = {id(picky): decision("busy", 0.1), id(easy): decision("idle", 4.0)}

    went = next_to_go(
        [picky, easy], 1.0, lambda w: best[id(w)], lambda name: name == "idle", unheard
    )

    assert went == (easy, best[id(easy)])
    assert easy.prefill_s == 4.0


def test_nobody_goes_when_every_best_worker_is_busy():
    queue = [waiting(0.0, 1.0) for _ in range(3)]

    assert next_to_go(queue, 1.0, lambda w: decision("busy"), lambda name: False, unheard) is None


def test_the_seconds_of_who_waits_for_a_worker_are_promised_before_the_next_is_judged():
    """All want what one busy worker holds; an idle one would compute it in three seconds, two of
    them anew: who would wait for five seconds goes there."""
    queue = [waiting(0.0, 1.0) for _ in range(6)]
    promised = []

    def decide(_):
        busy = decision("busy", 1.0, queue_s=float(len(promised)))
        return min(busy, decision("idle", 3.0), key=lambda d: d.total_s)

    went = next_to_go(
        queue, 1.0, decide, lambda name: name == "idle", lambda *what: promised.append(what)
    )

    assert went == (queue[5], decision("idle", 3.0))
    assert promised == [("busy", 1.0)] * 5
    assert queue[5].prefill_s == 3.0
    assert queue[4].prefill_s == 1.0


def test_a_free_worker_that_somebody_wants_is_for_nobody_who_wants_another_one():
    """The last one's work is short there; the others' would be long."""
    queue = [waiting(0.0, 1.0) for _ in range(5)]
    promised = []

    def decide(asked):
        return decision("idle" if promised or asked is queue[-1] else "busy")

    went = next_to_go(
        queue, 1.0, decide, lambda name: name == "idle", lambda *what: promised.append(what)
    )

    assert went == (queue[-1], decision("idle"))
    assert not promised


def test_the_work_of_one_turn_is_bounded():
    asked = []
    queue = [waiting(0.0, 1.0) for _ in range(10 * MAX_CONSIDERED)]

    next_to_go(
        queue, 1.0, lambda w: asked.append(w) or decision("busy"), lambda name: False, unheard
    )

    assert len(asked) == 2 * MAX_CONSIDERED - 1  # the first in the queue has nobody before it


def test_only_those_whose_last_wish_is_free_are_judged_again():
    asked = []
    queue = [waiting(0.0, 1.0) for _ in range(6)]
    for number, request in enumerate(queue):
        request.wish = ("busy", "idle")[number % 2]

    def decide(request):
        asked.append(request)
        return decision("busy" if len(asked) == 1 else "idle")

    went = next_by_wish(queue, 1.0, decide, lambda name: name == "idle")

    assert went == (queue[3], decision("idle"))
    assert asked == [queue[1], queue[3]]
    assert [request.wish for request in queue[:4]] == ["busy", "busy", "busy", "idle"]


def test_nobody_goes_by_a_wish_that_is_busy():
    queue = [waiting(0.0, 1.0)]
    queue[0].wish = "busy"

    assert next_by_wish(queue, 1.0, lambda w: decision("idle"), lambda n: n == "idle") is None


def test_who_waits_alone_for_a_worker_is_judged_once():
    asked = []
    queue = [waiting(0.0, 1.0 + number) for number in range(5)]

    def decide(request):
        asked.append(request)
        return decision(f"busy {request.prefill_s:.0f}", request.prefill_s)

    assert next_to_go(queue, 9.0, decide, lambda name: False, unheard) is None
    assert len(asked) == 5


def test_the_expected_wait_counts_shorter_ones_only_and_is_nothing_on_a_free_worker():
    queue = [waiting(0.0, 4.0), waiting(0.0, 40.0)]

    assert expected_wait(queue, 10.0, [2.0, 2.0]) == 4.0
    assert expected_wait([], 10.0, [0.0, 9.0]) == 0.0
    assert expected_wait(queue, 1.0, [3.0, 9.0]) == 3.0


@given(st.floats(0, 1e6), st.floats(0, 1e6), st.floats(0, 1e3))
def test_the_response_ratio_is_never_below_one(arrived, later, prefill):
    assert response_ratio(waiting(arrived, prefill), arrived + later) >= 1.0


def test_who_cannot_go_keeps_nobody_from_being_judged_but_counts_at_the_worker_he_waits_for():
    crowd = [waiting(0.0, 1.0) for _ in range(2 * MAX_CONSIDERED)]
    for request in crowd:
        request.wish = "busy"
    able = waiting(0.5, 10.0)
    asked, promised = [], []

    def decide(request):
        asked.append(request)
        busy = decision("busy", 1.0, queue_s=float(len(promised)))
        return min(busy, decision("idle", 3.0), key=lambda d: d.total_s)

    went = next_to_go(
        [*crowd, able],
        1.0,
        decide,
        lambda name: name == "idle",
        lambda *what: promised.append(what),
        able=lambda request: request is able,
    )

    assert went == (able, decision("idle", 3.0))
    assert set(map(id, asked)) == {id(able)}
    assert promised == [("busy", 1.0)] * len(crowd)
