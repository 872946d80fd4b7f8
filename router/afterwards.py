"""What can wait until answers are on their way: counting, lines of the log, what watchers see.

Many such notes made one after the other take a third of the time that each takes between other
work, when a processor has forgotten the code and data of the last one. They wait for `PATIENCE_S`
at most, less if there are `MOST` or if the router has nothing else to do.
"""

import asyncio
import logging
from collections.abc import Callable

MOST = 64
PATIENCE_S = 0.05

log = logging.getLogger(__name__)


class Afterwards:
    """Owned by the router's event loop. Whoever reads what is noted calls `catch_up` before."""

    def __init__(self) -> None:
        self._notes: list[Callable[[], None]] = []
        self._timer: asyncio.TimerHandle | None = None

    def note(self, note: Callable[[], None]) -> None:
        """Call ``note`` soon, in the order of the calls of this."""
        self._notes.append(note)
        if len(self._notes) >= MOST:
            self.catch_up()
        elif self._timer is None:
            loop = asyncio.get_running_loop()
            self._timer = loop.call_later(PATIENCE_S, self._late)

    def catch_up(self) -> None:
        """Do now what waits."""
        notes, self._notes = self._notes, []
        for note in notes:
            try:
                note()
            except Exception:  # the others are not to be lost, nor is this fault
                log.exception("a note about a request failed: a fault of the router")

    def close(self) -> None:
        """Do what waits, for the last time."""
        self.catch_up()
        if self._timer is not None:
            self._timer.cancel()

    def _late(self) -> None:
        self._timer = None
        self.catch_up()
