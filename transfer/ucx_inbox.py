"""`Inbox`: a worker of its own for the messages of one connection, so that its end is certain.

UCX can take back a receive that no message has met, but not one whose message is arriving; only
a worker that is gone writes nowhere. With it goes all that came for nobody: no message of this
connection is ever taken by another.
"""

import contextlib
import functools
from collections.abc import Callable, Sequence

from prefixfleet.store.errors import PeerLost, ProtocolError, PullFailed
from prefixfleet.transfer.ucx_batch import Batch, Done
from prefixfleet.transfer.ucx_events import Events
from prefixfleet.transfer.ucx_get import Libucp
from prefixfleet.transfer.ucx_worker import Worker


class Inbox:
    """Owned by the UCX thread. Raises `PeerLost` if UCX makes no worker.

    No tag is used twice. A receive that fails, and a message that nothing waits for, end it. Once
    it is ``gone`` nothing is written to the target of any receive any more.
    """

    closing = False  # it is gone at once

    def __init__(self, ucp: Libucp, context: int, events: Events) -> None:
        self.gone = False
        self._worker = Worker(ucp, context)
        self._events = events
        self._batches: list[Batch] = []
        self._tags = 1  # the next one
        self.address = self._worker.address()
        events.add(self._worker.handle)

    def receive(self, pieces: Sequence[tuple[int, int]], done: Done) -> int:
        """Wait for a message for each piece, address and length. Returns the first one's tag, the
        next ones follow it; ``done`` hears of the end. Raises `PeerLost`."""
        if self.gone:
            raise PeerLost("the connection was closed on this side")
        first, self._tags = self._tags, self._tags + len(pieces)
        operations = (
            (
                functools.partial(self._worker.receive, address, length, tag),
                functools.partial(self._worker.received, length),
            )
            for tag, (address, length) in enumerate(pieces, first)
        )
        self._batches.append(Batch(operations, at_once=len(pieces), done=done))
        self._events.touch(self._worker.handle)
        self.advance()
        return first

    def advance(self) -> None:
        """Collect what is here; end where something came that must not."""
        if self.gone:
            return
        self._batches = [batch for batch in self._batches if not batch.advance()]
        failed = next((batch.error for batch in self._batches if batch.error), None)
        if failed is None and self._worker.unasked():
            failed = ProtocolError("UCX: got a message that nothing waits for")
        if failed is not None:
            self._end(failed)

    def close(self, told: Callable[[], None]) -> None:
        """End it, and call ``told``."""
        if not self.gone:
            self._end(PeerLost("the connection was closed on this side"))
        told()

    def _end(self, error: PullFailed) -> None:
        self.gone = True
        self._events.remove(self._worker.handle)
        for request, over in [step for batch in self._batches for step in batch.under_way]:
            self._worker.cancel(request)
            with contextlib.suppress(
                PullFailed
            ):  # it says that it was cancelled, where it could be
                over(request)
        self._worker.destroy()
        batches, self._batches = self._batches, []
        for batch in batches:
            batch.abandon(error)
