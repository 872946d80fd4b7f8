"""A service in a thread: its start, its end and its faults are seen by who hosts it."""

import asyncio
import threading

import pytest

from prefixfleet.cluster.hosted import Hosted
from prefixfleet.store.errors import ConfigError


async def serves(up, stop):
    up({"is": "up"})
    await stop.wait()


async def cannot_start(up, stop):
    raise ConfigError("set something")


async def fails_later(up, stop):
    up({})
    await asyncio.sleep(0)
    raise RuntimeError("a fault")


async def never_up(up, stop):
    await stop.wait()


async def deaf(up, stop):
    up({})
    while True:
        try:
            await asyncio.sleep(0.05)
            if stop.is_set() and stop_at_last.is_set():
                return
        except asyncio.CancelledError:
            pass


stop_at_last = threading.Event()


def unexpected():
    raise AssertionError("it did not end by a fault")


def test_a_service_says_when_it_is_up_and_ends_when_told():
    hosted = Hosted(serves, unexpected)

    assert hosted.ready.result(20) == {"is": "up"}
    assert hosted.stop(20)
    assert hosted.stop(20)  # again does nothing


def test_what_stops_a_start_is_raised_where_it_is_waited_for():
    hosted = Hosted(cannot_start, unexpected)

    with pytest.raises(ConfigError, match="set something"):
        hosted.ready.result(20)
    assert hosted.stop(20)


def test_a_fault_of_a_service_that_was_up_is_reported_once():
    ended = threading.Event()

    hosted = Hosted(fails_later, ended.set)

    assert hosted.ready.result(20) == {}
    assert ended.wait(20)


def test_a_service_that_is_stopped_before_it_was_up_says_so():
    hosted = Hosted(never_up, unexpected)

    assert hosted.stop(20)

    with pytest.raises(ConfigError, match="stopped before it was up"):
        hosted.ready.result(20)


def test_a_service_that_does_not_end_is_told_apart():
    stop_at_last.clear()
    hosted = Hosted(deaf, unexpected)
    hosted.ready.result(20)

    assert not hosted.stop(0.1)

    stop_at_last.set()
    assert hosted.stop(20)
