"""`Inbox`: a worker of its own for the messages of one connection, so that its end is certain.

UCX can take back a receive that no message has met; one whose message is arriving ends with the
endpoint, and at the latest with the worker. With that goes all that came for nobody: no message
of this connection is ever taken by another.
"""

import functools
from collections.abc import Callable, Sequence

from prefixfleet.store.errors import PeerLost, ProtocolError, PullFailed
from prefixfleet.transfer.ucx_batch import Batch, Done
from prefixfleet.transfer.ucx_events import Events
from prefixfleet.transfer.ucx_get import Libucp
from prefixfleet.transfer.ucx_remote import Remote
from prefixfleet.transfer.ucx_worker import Worker

END_S = 1.0
"""An endpoint that UCX has not closed after so long goes with the worker: it leaves some memory
of UCX's behind, and says so."""


class Inbox:
    """Owned by the UCX thread. Raises `PeerLost` if UCX makes no worker, or has no way to that of
    the peer.

    No tag is used twice. A receive that fails, and a message that nothing waits for, end it. Once
    it is ``gone`` nothing is written to the target of any receive any more.
    """

    def __init__(
        self,
        ucp: Libucp,
        context: int,
        peer: bytes,
        *,
        events: Events,
        clock: Callable[[], float],
    ) -> None:
        self.gone = False
        self._worker = Worker(ucp, context)
        try:
            # of this endpoint and the peer's own UCX makes one connection, which we can close
            self._endpoint = Remote(ucp, self._worker.handle, peer)
            self.address = self._worker.address()
            events.add(self._worker.handle)
        except PeerLost:
            self._worker.destroy()
            raise
        self._events = events
        self._clock = clock
        self._batches: list[Batch] = []
        self._tags = 1  # the next one
        self._error: PullFailed | None = None  # why it is to end
        self._end_by = 0.0
        self._told: list[Callable[[], None]] = []

    @property
    def closing(self) -> bool:
        """Whether it is to end, and is not gone yet."""
        return self._error is not None and not self.gone

    def receive(self, pieces: Sequence[tuple[int, int]], done: Done) -> int:
        """Wait for a message for each piece, address and length. Returns the first one's tag, the
        next ones follow it; ``done`` hears of the end. Raises `PullFailed` if it has ended."""
        if self._error is not None:
            raise type(self._error)(str(self._error))
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
        if self._error is None:
            failed = next((batch.error for batch in self._batches if batch.error), None)
            if failed is None and self._worker.unasked():
                failed = ProtocolError("UCX: got a message that nothing waits for")
            if failed is not None:
                self._end(failed)
        else:
            self._endpoint.advance()
            closed = self._endpoint.gone and not self._batches
            if closed or self._clock() > self._end_by:
                self._go()

    def close(self, told: Callable[[], None]) -> None:
        """Begin to end it; ``told`` hears when it is gone, at once if it is already."""
        if self.gone:
            told()
            return
        self._told.append(told)
        self._end(PeerLost("the connection was closed on this side"))

    def _end(self, error: PullFailed) -> None:
        if self._error is not None:
            return
        self._error = error
        self._end_by = self._clock() + END_S
        for batch in self._batches:
            batch.error = batch.error or error
            for request, _ in batch.under_way:
                self._worker.cancel(request)
        self._endpoint.close(lambda: None)
        self._events.touch(self._worker.handle)

    def _go(self) -> None:
        self._events.remove(self._worker.handle)
        self._worker.destroy()
        self.gone = True  # others' threads look: not before nothing is written any more
        for batch in self._batches:
            batch.abandon(PeerLost("the connection was closed on this side"))
        for told in self._told:
            told()
