"""Degraded modes: what does not work at the moment, since when, why, and what to do about it.

A fallback is never silent: it is logged once when it starts and once when it ends, counted in a
metric, and listed in ``/status``.
"""

import logging
from collections.abc import Callable
from dataclasses import dataclass

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Mode:
    """One thing that does not work. ``since_s`` is on the router's monotonic clock."""

    name: str
    reason: str
    remedy: str
    since_s: float


class Degraded:
    """Owned by the router's event loop."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._modes: dict[str, Mode] = {}

    def enter(self, name: str, reason: str, remedy: str) -> None:
        """Mode ``name`` holds from now on; entering it again changes the reason only."""
        known = self._modes.get(name)
        since_s = known.since_s if known else self._clock()
        self._modes[name] = Mode(name, reason, remedy, since_s)
        if known is None:
            log.warning("degraded: %s: %s; %s", name, reason, remedy)

    def end(self, name: str) -> None:
        """Mode ``name`` is over; does nothing if it never held."""
        if self._modes.pop(name, None):
            log.warning("no longer degraded: %s", name)

    def modes(self) -> list[Mode]:
        """What holds now."""
        return list(self._modes.values())
