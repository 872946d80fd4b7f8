"""The thread that UCX lives on: it sleeps on UCX's own event descriptor and costs nothing idle.

Everything UCX happens here: registering memory, connecting, reading, closing, and serving what
peers read. Others hand work over with `run` and get a future of their own event loop.
"""

import asyncio
import contextlib
import logging
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

from prefixfleet.store.errors import PeerLost, PullFailed
from prefixfleet.transfer.ucx_binding import Binding, Endpoint
from prefixfleet.transfer.ucx_get import Libucp

log = logging.getLogger(__name__)

Result = TypeVar("Result")

WAIT_MS = 1000
"""The longest sleep: also where an event were lost, progress goes on."""
OPERATIONS = 8
"""Reads of one `Reading` in flight."""
STOP_S = 5.0


@dataclass(slots=True)
class Reading:
    """One batch of one-sided reads. Owned by the UCX thread."""

    remote: "Remote"
    todo: Iterator[tuple[int, int, int]]  # remote address, target address, length
    done: Callable[[PullFailed | None], None]
    requests: list[int] = field(default_factory=list)
    error: PullFailed | None = None


@dataclass(slots=True)
class Remote:
    """A peer's registered memory over one endpoint. Owned by the UCX thread."""

    endpoint: Endpoint
    rkey: int
    transports: str
    readings: list[Reading] = field(default_factory=list)


class UcxThread:
    """Owns binding, worker and thread. Start it before use, stop it after; `run` from any loop."""

    def __init__(self, binding: str | None = None) -> None:
        self._wanted = binding
        self._work: deque[Callable[[], None]] = deque()
        self._remotes: list[Remote] = []
        self._stopping = False  # on the UCX thread
        self._stopped = False  # on the others'
        self._ready: asyncio.Future[None] | None = None
        self._thread = threading.Thread(target=self._main, name="prefixfleet-ucx", daemon=True)
        self.binding: Binding
        self.ucp: Libucp

    async def start(self) -> None:
        """Returns when UCX is up. Raises `ConfigError`."""
        loop = asyncio.get_running_loop()
        self._ready = loop.create_future()
        self._loop = loop
        self._thread.start()
        await self._ready

    async def stop(self) -> None:
        """Close what is left and end the thread."""
        self._post(self._stop)
        self._stopped = True
        await asyncio.to_thread(self._thread.join, STOP_S)
        if self._thread.is_alive():
            log.error("the UCX thread did not end within %s s", STOP_S)

    def run(self, call: Callable[[], Result]) -> "asyncio.Future[Result]":
        """The result of ``call``, made on the UCX thread; its exceptions come back too."""
        loop = asyncio.get_running_loop()
        future: asyncio.Future[Result] = loop.create_future()

        def work() -> None:
            try:
                result = call()
            except Exception as error:  # noqa: BLE001 - it is raised where it is awaited
                _tell(loop, future.set_exception, future, error)
            else:
                _tell(loop, future.set_result, future, result)

        self._post(work)
        return future

    def read(
        self, remote: Remote, operations: Sequence[tuple[int, int, int]]
    ) -> "asyncio.Future[None]":
        """Make all the reads; done when the last byte is here, or the first has failed."""
        loop = asyncio.get_running_loop()
        future: asyncio.Future[None] = loop.create_future()

        def done(error: PullFailed | None) -> None:
            if error is None:
                _tell(loop, future.set_result, future, None)
            else:
                _tell(loop, future.set_exception, future, error)

        reading = Reading(remote, iter(operations), done)
        self._post(lambda: self._start(reading))
        return future

    def connect(self, address: bytes, packed_rkey: bytes) -> Remote:
        """On the UCX thread: an endpoint to a peer's worker and the key of its memory."""
        endpoint = self.binding.connect(address)
        try:
            rkey = self.ucp.unpack_rkey(endpoint.handle, packed_rkey)
        except PeerLost:
            endpoint.close()
            raise
        remote = Remote(endpoint, rkey, self.ucp.transports(endpoint.handle))
        self._remotes.append(remote)
        return remote

    def disconnect(self, remote: Remote) -> None:
        """On the UCX thread: close by force. Afterwards nothing is written to any target."""
        if remote not in self._remotes:
            return
        self._remotes.remove(remote)
        remote.endpoint.close()
        for reading in list(remote.readings):
            reading.error = reading.error or PeerLost("the connection was closed on this side")
            while not self._advance(reading):
                self.binding.progress()
        self.ucp.destroy_rkey(remote.rkey)

    def _post(self, work: Callable[[], None]) -> None:
        if self._stopped:
            raise PeerLost("UCX is stopped")
        self._work.append(work)
        self.ucp.signal(self.binding.worker)

    def _start(self, reading: Reading) -> None:
        reading.remote.readings.append(reading)
        if reading.remote not in self._remotes:
            reading.error = PeerLost("the connection was closed on this side")
        self._advance(reading)

    def _advance(self, reading: Reading) -> bool:
        """Collect what is over, start what may start. True when the whole reading is over."""
        for request in list(reading.requests):
            try:
                if self.ucp.finished(request):
                    reading.requests.remove(request)
            except PeerLost as error:
                reading.requests.remove(request)
                reading.error = reading.error or error
        self._start_more(reading)
        if reading.requests:
            return False
        reading.remote.readings.remove(reading)
        reading.done(reading.error)
        return True

    def _start_more(self, reading: Reading) -> None:
        remote = reading.remote
        while reading.error is None and len(reading.requests) < OPERATIONS:
            step = next(reading.todo, None)
            if step is None:
                return
            source, target, length = step
            try:
                request = self.ucp.get(remote.endpoint.handle, target, length, source, remote.rkey)
            except PeerLost as error:
                reading.error = error
            else:
                if request:
                    reading.requests.append(request)

    def _main(self) -> None:
        assert self._ready is not None
        try:
            self.binding = Binding(self._wanted)
            self.ucp = Libucp()
        except Exception as error:  # noqa: BLE001 - `start` raises it
            _tell(self._loop, self._ready.set_exception, self._ready, error)
            return
        _tell(self._loop, self._ready.set_result, self._ready, None)
        while not self._stopping:
            self.binding.wait(WAIT_MS)
            while self._work:
                self._work.popleft()()
            for remote in self._remotes:
                for reading in list(remote.readings):
                    self._advance(reading)
        del self.binding

    def _stop(self) -> None:
        for remote in list(self._remotes):
            self.disconnect(remote)
        self._stopping = True


def _tell(
    loop: asyncio.AbstractEventLoop,
    tell: Callable[[Any], None],
    future: "asyncio.Future[Any]",
    value: object,
) -> None:
    """Settle a future of another thread's loop, if both still live."""

    def settle() -> None:
        if not future.done():
            tell(value)

    with contextlib.suppress(RuntimeError):  # the loop is closed
        loop.call_soon_threadsafe(settle)
