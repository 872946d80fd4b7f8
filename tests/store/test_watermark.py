"""Free slots follow load: quickly up, slowly down, never swinging, never out of bounds."""

from hypothesis import given
from hypothesis import strategies as st

from prefixfleet.store.watermark import LEAST_SHARE, MOST_SHARE, follow, start

SLOTS = 6400


def run(mark, *, rate, seconds, step=0.5):
    """Steady load of ``rate`` slots a second."""
    for _ in range(int(seconds / step)):
        mark = follow(mark, taken=int(rate * step), waiting=0, refused=0, now=mark.at_s + step)
    return mark


def test_an_idle_pool_keeps_the_least_and_holds_prefixes_with_the_rest():
    assert start(SLOTS, 0.0).share == LEAST_SHARE


def test_a_high_rate_keeps_more_room_for_requests():
    busy = run(start(SLOTS, 0.0), rate=400, seconds=60)

    assert 0.1 < busy.share < MOST_SHARE


def test_the_mark_comes_back_when_the_load_is_gone():
    busy = run(start(SLOTS, 0.0), rate=400, seconds=60)

    assert run(busy, rate=0, seconds=120).share == LEAST_SHARE


def test_a_small_change_of_load_does_not_move_the_mark():
    """Hysteresis: evicting and refilling with every ripple would cost more than it frees."""
    busy = run(start(SLOTS, 0.0), rate=400, seconds=60)

    assert run(busy, rate=320, seconds=60).keep_free == busy.keep_free


def test_refused_and_waiting_slots_raise_the_mark_at_once():
    mark = start(SLOTS, 0.0)

    pressed = follow(mark, taken=0, waiting=300, refused=200, now=0.1)

    assert pressed.keep_free >= 500


@given(
    st.integers(1, 10**6),
    st.lists(
        st.tuples(st.integers(0, 10**7), st.integers(0, 10**7), st.floats(0, 1e4)), max_size=20
    ),
)
def test_the_mark_stays_within_its_bounds_whatever_happens(num_slots, steps):
    mark = start(num_slots, 0.0)
    for taken, refused, elapsed in steps:
        mark = follow(mark, taken=taken, waiting=0, refused=refused, now=mark.at_s + elapsed)

        assert 1 <= mark.keep_free <= max(1, round(num_slots * MOST_SHARE))
