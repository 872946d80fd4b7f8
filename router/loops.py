"""What a router does all the time, besides answering requests: one endless task each."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING

from prefixfleet.router.arrivals import bring_newcomers
from prefixfleet.router.exchange import Exchange
from prefixfleet.router.health import HealthChecks
from prefixfleet.router.silence import watch_silence

if TYPE_CHECKING:
    from prefixfleet.router.core import Router

RELOAD_S = 1.0

Loop = Callable[[], Awaitable[None]]


def loops_of(router: "Router") -> dict[str, Loop]:
    """By the name that `kept_running` tells of one that fails; only those that ``router`` needs."""
    loops: dict[str, Loop] = {
        "index": router.feed.run,
        "roster": router.roster.run,
        "arrivals": lambda: bring_newcomers(router),
        "files": lambda: _reload(router),
        "silence": lambda: watch_silence(router),
        "background": router.background.run,
    }
    if router.cache_feed is not None:
        loops["engine caches"] = router.cache_feed.run
    if router.keepers.shared is not None:
        loops["responses"] = router.keepers.run
    if interval_s := router.settings.health_interval_s:
        loops["health"] = HealthChecks(router.roster, router.session, interval_s).run
    if router.fleet.loads is not None:
        board = Exchange(router.fleet.loads, router.book, router.turns.load, router.degraded)
        loops["loads"] = board.run
    return loops


async def _reload(router: "Router") -> None:
    while True:
        router.reload()
        await asyncio.sleep(RELOAD_S)
