"""The thread that UCX lives on: it sleeps on UCX's own event descriptor and costs nothing idle.

Everything UCX happens here: registering memory, connecting, reading, closing, and serving what
peers read. Others hand work over with `run` and get a future of their own event loop.
"""

import asyncio
import contextlib
import functools
import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Any, TypeVar

from prefixfleet.store.errors import PeerLost, PullFailed
from prefixfleet.transfer.ucx_batch import Done
from prefixfleet.transfer.ucx_binding import Binding
from prefixfleet.transfer.ucx_events import Events
from prefixfleet.transfer.ucx_get import Libucp
from prefixfleet.transfer.ucx_inbox import Inbox
from prefixfleet.transfer.ucx_remote import Remote

log = logging.getLogger(__name__)

Result = TypeVar("Result")

WAIT_MS = 1000
"""The longest sleep: also where an event were lost, progress goes on."""
CLOSING_MS = 20
"""The longest sleep while an endpoint closes: what ends there need not be an event."""
STOP_S = 5.0
"""What is left is closed within so long, or given up with the thread."""
MAX_WORK = 4096
"""Calls that wait for the thread; it takes one in microseconds, so then it stands still."""


class UcxThread:
    """Owns binding, worker and thread. Start it before use, stop it after; `run` from any loop."""

    def __init__(self, binding: str | None = None) -> None:
        self._wanted = binding
        self._work: deque[Callable[[], None]] = deque()
        self._remotes: list[Remote | Inbox] = []
        self._closing = False  # whether any of them is
        self._stop_by: float | None = None  # on the UCX thread
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
        self._stopped = True
        self._work.append(self._stop)
        self.ucp.signal(self.binding.worker)
        await asyncio.to_thread(self._thread.join, STOP_S + WAIT_MS / 1000)
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

    def begin(
        self, call: Callable[[Done], Result]
    ) -> "tuple[asyncio.Future[Result], asyncio.Future[None]]":
        """The result of ``call``, made on the UCX thread with what is to hear of the end of what
        it begins; and that end."""
        loop = asyncio.get_running_loop()
        ended: asyncio.Future[None] = loop.create_future()
        ended.add_done_callback(lambda end: end.cancelled() or end.exception())  # it may be late

        def done(error: PullFailed | None) -> None:
            if error is None:
                _tell(loop, ended.set_result, ended, None)
            else:
                _tell(loop, ended.set_exception, ended, error)

        return self.run(lambda: call(done)), ended

    def disconnect(self, remote: Remote | Inbox) -> "asyncio.Future[None]":
        """Close by force; done when nothing is written to any target any more, and nothing read
        that was being sent.

        Nothing promises that UCX ever says so: bound the wait, and until it is done give no
        target away.
        """
        loop = asyncio.get_running_loop()
        future: asyncio.Future[None] = loop.create_future()
        if remote.gone:
            future.set_result(None)
        else:
            told = functools.partial(_tell, loop, future.set_result, future, None)
            self._post(lambda: self.close(remote, told))
        return future

    def connect(self, address: bytes, packed_rkey: bytes | None = None) -> Remote:
        """On the UCX thread: an endpoint to a peer's worker, with the key of its memory if it is
        to be read. Raises `PeerLost`, `KeyUnusable`."""
        remote = Remote(self.ucp, self.binding.worker, address)
        self._remotes.append(remote)
        try:
            remote.look()
            if packed_rkey is not None:
                remote.unpack(packed_rkey)
        except PeerLost:
            self.close(remote)
            raise
        return remote

    def open_inbox(self, peer: bytes) -> Inbox:
        """On the UCX thread: where the messages of one peer's worker come to. Raises `PeerLost`."""
        context, clock = self.binding.context, time.monotonic
        inbox = Inbox(self.ucp, context, peer, events=self._events, clock=clock)
        self._remotes.append(inbox)
        return inbox

    def close(self, remote: Remote | Inbox, told: Callable[[], None] = lambda: None) -> None:
        """On the UCX thread: what `disconnect` begins."""
        remote.close(told)
        self._closing = True
        self._events.progress()

    def _post(self, work: Callable[[], None]) -> None:
        if self._stopped:
            raise PeerLost("UCX is stopped")
        if len(self._work) >= MAX_WORK:
            raise PeerLost(f"UCX stands still: {MAX_WORK} calls wait for it")
        self._work.append(work)
        self.ucp.signal(self.binding.worker)

    def _main(self) -> None:
        assert self._ready is not None
        try:
            self.binding = Binding(self._wanted)
            self.ucp = Libucp()
            self._events = Events(self.ucp, self.binding)
        except Exception as error:  # noqa: BLE001 - `start` raises it
            _tell(self._loop, self._ready.set_exception, self._ready, error)
            return
        _tell(self._loop, self._ready.set_result, self._ready, None)
        while not self._ended():
            self._events.wait(CLOSING_MS if self._closing else WAIT_MS)
            while self._work:
                self._work.popleft()()
            for remote in self._remotes:
                remote.advance()
            self._remotes = [remote for remote in self._remotes if not remote.gone]
            self._closing = any(remote.closing for remote in self._remotes)
        if self._remotes:  # what UCX still works with stays
            log.error("UCX did not close %d endpoints within %s s", len(self._remotes), STOP_S)
        else:
            self._events.close()
            del self.binding

    def _stop(self) -> None:
        self._stop_by = time.monotonic() + STOP_S
        for remote in list(self._remotes):
            self.close(remote)

    def _ended(self) -> bool:
        if self._stop_by is None:
            return False
        return not self._remotes or time.monotonic() > self._stop_by


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
