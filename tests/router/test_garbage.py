"""A router's process looks for garbage seldom, and not at what was there when it started."""

import gc

import pytest

from prefixfleet.router.garbage import look_seldom


@pytest.fixture(autouse=True)
def as_before():
    thresholds = gc.get_threshold()
    yield
    gc.set_threshold(*thresholds)
    gc.unfreeze()


class Cycle:
    def __init__(self):
        self.me = self


def test_what_came_before_is_left_out_and_what_comes_is_still_found():
    before = gc.get_threshold()

    look_seldom()

    assert gc.get_freeze_count() > 0
    assert gc.isenabled()
    assert all(ours > pythons for ours, pythons in zip(gc.get_threshold(), before, strict=True))
    Cycle()
    assert gc.collect() >= 1
