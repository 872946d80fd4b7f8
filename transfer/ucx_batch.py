"""`Batch`: operations of UCX that begin in their order, some of them under way at once. No I/O.

Everything here is called on the thread that owns the worker, and none of it waits.
"""

from collections import deque
from collections.abc import Callable, Iterable

from prefixfleet.store.errors import PullFailed

WATCHED = 8
"""Operations looked at in each round: of those under way, the ones that began first."""

Begin = Callable[[], int]
"""Starts one operation. Returns its request, or 0 if it is over already; raises `PullFailed`."""
Over = Callable[[int], bool]
"""Whether the operation of a request is over; then it is freed. Raises `PullFailed`."""
Done = Callable[[PullFailed | None], None]
"""Told of the end of something that UCX does, and why it failed if it did."""


class Batch:
    """Owned by the endpoint or the worker that it runs on. ``done`` hears of its end, once; after
    an error when nothing that was started is under way any more."""

    def __init__(
        self, operations: Iterable[tuple[Begin, Over]], *, at_once: int, done: Done
    ) -> None:
        self.error: PullFailed | None = None
        self._todo = iter(operations)
        self._under_way: deque[tuple[int, Over]] = deque()
        self._at_once = at_once
        self._done = done

    @property
    def under_way(self) -> list[tuple[int, Over]]:
        """Requests that are not known to be over, and what tells."""
        return list(self._under_way)

    def advance(self) -> bool:
        """Collect what is over, start what may start. Returns whether it has ended."""
        while self._collect():
            pass
        self._start_more()
        if self._under_way:
            return False
        self._done(self.error)
        return True

    def abandon(self, error: PullFailed) -> None:
        """The worker is gone, and with it whatever was under way."""
        self._done(self.error or error)

    def _collect(self) -> bool:
        """Returns whether some were over: then there may be more."""
        watched = [self._under_way.popleft() for _ in range(min(WATCHED, len(self._under_way)))]
        left = [step for step in watched if not self._over(*step)]
        self._under_way.extendleft(reversed(left))
        return len(left) < len(watched)

    def _over(self, request: int, over: Over) -> bool:
        try:
            return over(request)
        except PullFailed as error:
            self.error = self.error or error
            return True

    def _start_more(self) -> None:
        while self.error is None and len(self._under_way) < self._at_once:
            step = next(self._todo, None)
            if step is None:
                return
            begin, over = step
            try:
                if request := begin():
                    self._under_way.append((request, over))
            except PullFailed as error:
                self.error = error
