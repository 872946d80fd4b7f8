"""`Remote`: one UCX endpoint to a peer, what runs over it, and its end.

Everything here is called on the thread that owns the worker, and none of it waits.
"""

import functools
import itertools
import logging
from collections.abc import Callable, Iterable

from prefixfleet.store.errors import PeerLost
from prefixfleet.transfer.ucx_batch import Batch, Begin, Done
from prefixfleet.transfer.ucx_get import Libucp

log = logging.getLogger(__name__)

OPERATIONS = 8
"""Reads or messages of one batch in flight."""


class KeyUnusable(PeerLost):
    """UCX can do nothing with the key of the peer's memory: it cannot be read one-sided."""


class Remote:
    """Owned by the UCX thread. Raises `PeerLost` where UCX has no way to the peer's worker.

    Once it is ``gone`` nothing is written to the target of any of its reads any more, and nothing
    that it sent is read.
    """

    def __init__(self, ucp: Libucp, worker: int, address: bytes) -> None:
        self.gone = False
        self.transports = ""
        self._ucp = ucp
        self._endpoint = ucp.connect(worker, address)
        self._rkey = 0
        self._batches: list[Batch] = []
        self._sends: list[Batch] = []
        self._closing: int | None = None  # the request that closes the endpoint, 0 when it is over
        self._told: list[Callable[[], None]] = []

    @property
    def closing(self) -> bool:
        """Whether it is to be closed, and is not gone yet."""
        return self._closing is not None and not self.gone

    def look(self) -> None:
        """See which transports UCX has chosen. Raises `PeerLost`."""
        self.transports = self._ucp.transports(self._endpoint)

    def unpack(self, packed_rkey: bytes) -> None:
        """Take the key of the peer's memory, before the first read. Raises `KeyUnusable`."""
        try:
            self._rkey = self._ucp.unpack_rkey(self._endpoint, packed_rkey)
        except PeerLost as error:
            raise KeyUnusable(str(error)) from error

    def read(self, pieces: Iterable[tuple[int, int, int]], done: Done) -> None:
        """Begin to read ``pieces``: the peer's address, ours, length. ``done`` hears of the end."""
        get = functools.partial(self._ucp.get, self._endpoint)
        begins = (
            functools.partial(get, ours, length, theirs, self._rkey)
            for theirs, ours, length in pieces
        )
        self._start(self._batches, begins, done)

    def send(self, pieces: Iterable[tuple[int, int]], tag: int, done: Done) -> None:
        """Begin to send ``pieces``, address and length, with this tag and those that follow it."""
        send = functools.partial(self._ucp.send, self._endpoint)
        numbered = zip(itertools.count(tag), pieces, strict=False)
        begins = (functools.partial(send, *piece, number) for number, piece in numbered)
        self._start(self._sends, begins, done)

    def advance(self) -> None:
        """Collect what is over, start what may start; once closing, forget what is closed."""
        self._batches = [batch for batch in self._batches if not batch.advance()]
        self._sends = [batch for batch in self._sends if not batch.advance()]
        if self._closing and self._over(self._closing):
            self._closing = 0
        if self._closing == 0:  # UCX does not end messages that the peer has not answered yet
            self._abandon_sends()
        if self._closing == 0 and not self._batches and not self.gone:
            if self._rkey:
                self._ucp.destroy_rkey(self._rkey)
            self.gone = True
            for told in self._told:
                told()

    def close(self, told: Callable[[], None]) -> None:
        """Begin to close by force; ``told`` hears when it is gone, at once if it is already."""
        if self.gone:
            told()
            return
        self._told.append(told)
        if self._closing is not None:
            return
        for batch in self._batches + self._sends:
            batch.error = batch.error or PeerLost("the connection was closed on this side")
        try:
            self._closing = self._ucp.close(self._endpoint)
        except PeerLost as error:  # its batches still say when they are over
            log.warning("an endpoint stays open: %s", error)
            self._closing = 0

    def _start(self, batches: list[Batch], begins: Iterable[Begin], done: Done) -> None:
        operations = ((begin, self._ucp.finished) for begin in begins)
        batch = Batch(operations, at_once=OPERATIONS, done=done)
        if self._closing is not None:
            batch.error = PeerLost("the connection was closed on this side")
        if not batch.advance():
            batches.append(batch)

    def _abandon_sends(self) -> None:
        sends, self._sends = self._sends, []
        for batch in sends:
            batch.abandon(PeerLost("the connection was closed on this side"))

    def _over(self, request: int) -> bool:
        try:
            return self._ucp.finished(request)
        except PeerLost:  # what is closed by force may say so
            return True
