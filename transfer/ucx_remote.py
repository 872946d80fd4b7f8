"""`Remote`: a peer's registered memory over one UCX endpoint, the reads from it, and its end.

Everything here is called on the thread that owns the worker, and none of it waits.
"""

import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from prefixfleet.store.errors import PeerLost, PullFailed
from prefixfleet.transfer.ucx_get import Libucp

log = logging.getLogger(__name__)

OPERATIONS = 8
"""Reads of one `Reading` in flight."""


@dataclass(slots=True)
class Reading:
    """One batch of one-sided reads. Owned by its `Remote`."""

    todo: Iterator[tuple[int, int, int]]  # remote address, target address, length
    done: Callable[[PullFailed | None], None]
    requests: list[int] = field(default_factory=list)
    error: PullFailed | None = None


class Remote:
    """Owned by the UCX thread. Raises `PeerLost` where UCX has no way to the peer's worker.

    Once it is ``gone`` nothing is written to the target of any of its readings any more.
    """

    def __init__(self, ucp: Libucp, worker: int, address: bytes) -> None:
        self.gone = False
        self.transports = ""
        self._ucp = ucp
        self._endpoint = ucp.connect(worker, address)
        self._rkey = 0
        self._readings: list[Reading] = []
        self._closing: int | None = None  # the request that closes the endpoint, 0 when it is over
        self._told: list[Callable[[], None]] = []

    @property
    def closing(self) -> bool:
        """Whether it is to be closed, and is not gone yet."""
        return self._closing is not None and not self.gone

    def unpack(self, packed_rkey: bytes) -> None:
        """Take the key of the peer's memory, before the first reading. Raises `PeerLost`."""
        self._rkey = self._ucp.unpack_rkey(self._endpoint, packed_rkey)
        self.transports = self._ucp.transports(self._endpoint)

    def start(self, reading: Reading) -> None:
        """Begin to read; ``reading.done`` hears of the end, at once if this is closed."""
        if self._closing is not None:
            reading.error = PeerLost("the connection was closed on this side")
        self._readings.append(reading)
        self._advance(reading)

    def advance(self) -> None:
        """Collect what is over, start what may start; once closing, forget what is closed."""
        for reading in list(self._readings):
            self._advance(reading)
        if self._closing and self._over(self._closing):
            self._closing = 0
        if self._closing == 0 and not self._readings and not self.gone:
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
        for reading in self._readings:
            reading.error = reading.error or PeerLost("the connection was closed on this side")
        try:
            self._closing = self._ucp.close(self._endpoint)
        except PeerLost as error:  # its reads still say when they are over
            log.warning("an endpoint stays open: %s", error)
            self._closing = 0

    def _over(self, request: int) -> bool:
        try:
            return self._ucp.finished(request)
        except PeerLost:  # what is closed by force may say so
            return True

    def _advance(self, reading: Reading) -> None:
        for request in list(reading.requests):
            try:
                if self._ucp.finished(request):
                    reading.requests.remove(request)
            except PeerLost as error:
                reading.requests.remove(request)
                reading.error = reading.error or error
        self._start_more(reading)
        if not reading.requests:
            self._readings.remove(reading)
            reading.done(reading.error)

    def _start_more(self, reading: Reading) -> None:
        while reading.error is None and len(reading.requests) < OPERATIONS:
            step = next(reading.todo, None)
            if step is None:
                return
            source, target, length = step
            try:
                request = self._ucp.get(self._endpoint, target, length, source, self._rkey)
            except PeerLost as error:
                reading.error = error
            else:
                if request:
                    reading.requests.append(request)
