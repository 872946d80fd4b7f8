"""`Stream`: whole buffers over one TCP socket, straight from and into memory.

Must not know frames. Long runs of bytes are moved by a thread that blocks in the kernel, where
the link has one to spare; all else by the event loop, without blocking.
"""

import asyncio
import concurrent.futures
import contextlib
import select
import socket
import time
from collections.abc import Callable, Sequence

from prefixfleet.store.errors import DeadlineExceeded, PeerLost
from prefixfleet.transfer.crew import Crew
from prefixfleet.transfer.link import Arrived, unheard

MAX_PARTS = 128
"""Buffers a system call; the kernel's own limit is 1024."""
IN_THREAD_BYTES = 1024 * 1024
"""Shorter runs are not worth the way to a thread and back."""
CALL_BYTES = 1024 * 1024
"""A thread's system call receives about so much: then we know that the peer lives."""
AHEAD_BYTES = 1024
"""A short receive takes so much if it is there: mostly a frame's header and its body at once. A
multiple of the header's size, which keeps what follows it on the same cache lines."""
STALL_S = 10.0
"""A peer that takes no byte for so long is given up; so is one that sends none into a target."""


class Stream:
    """One connected, tuned socket. Owned by one connection on one event loop; one task receives,
    any may send. Every call raises `PeerLost` when the connection is gone."""

    def __init__(self, sock: socket.socket, where: str, crew: Crew | None) -> None:
        self._sock = sock
        self._fd = sock.fileno()
        self._where = where
        self._crew = crew
        self._loop = asyncio.get_running_loop()
        self._sending = asyncio.Lock()
        self._waiters: set[asyncio.Future[None]] = set()
        self._in_threads: set[concurrent.futures.Future[None]] = set()
        self._closed = False
        self._ahead = memoryview(b"")  # received, and not asked for yet
        self.heard_at = time.monotonic()  # when bytes last came

    async def send(self, *parts: bytes | memoryview) -> None:
        """Send all of ``parts``, not mixed with what others send.

        A send that does not end leaves the peer with half a frame: close the stream after it.
        Raises `DeadlineExceeded` when the peer takes no byte for `STALL_S`.
        """
        views = [memoryview(part) for part in parts if len(part)]
        async with self._sending:
            if not await self._by_thread(self._send_blocking, views):
                await self._send(views)

    async def receive(self, count: int) -> bytearray:
        """The next ``count`` bytes."""
        have = len(self._ahead)
        buffer = bytearray(max(count, have + AHEAD_BYTES))
        buffer[:have] = self._ahead
        self._ahead = memoryview(b"")
        while have < count:
            have += await self._receive_some([memoryview(buffer)[have:]])
        self._ahead = memoryview(bytes(memoryview(buffer)[count:have]))
        del buffer[count:]
        return buffer

    async def receive_into(self, targets: Sequence[memoryview], arrived: Arrived = unheard) -> None:
        """Fill the targets, in order, with the next bytes. A thread that does it tells how many
        there are, while they are in its cache."""
        views = self._take_ahead([target for target in targets if target.nbytes])
        ahead = sum(target.nbytes for target in targets) - sum(view.nbytes for view in views)

        def receive(views: list[memoryview]) -> None:
            self._receive_blocking(views, ahead, arrived)

        if not await self._by_thread(receive, views):
            done = 0
            while done < len(views):
                done = _advance(views, done, await self._receive_some(views[done:]))

    def drop(self) -> None:
        """End the connection at once; whoever waits gets `PeerLost`. `close` must follow."""
        if self._closed:
            return
        self._closed = True
        self._loop.remove_reader(self._fd)
        self._loop.remove_writer(self._fd)
        for waiter in self._waiters:
            if not waiter.done():
                waiter.set_exception(PeerLost(f"{self._where}: closed on this side"))
        with contextlib.suppress(OSError):  # wakes the threads
            self._sock.shutdown(socket.SHUT_RDWR)

    async def close(self) -> None:
        """`drop`, and wait until no thread writes into a target any more. Repeated calls do
        nothing."""
        self.drop()
        waits = map(asyncio.wrap_future, list(self._in_threads))  # each takes itself out
        await asyncio.gather(*waits, return_exceptions=True)
        self._sock.close()

    async def _by_thread(
        self, call: Callable[[list[memoryview]], None], views: list[memoryview]
    ) -> bool:
        """Whether a thread did it; it is not worth it for few bytes, or none may be free."""
        if self._crew is None or sum(view.nbytes for view in views) < IN_THREAD_BYTES:
            return False
        if self._closed:
            raise PeerLost(f"{self._where}: closed on this side")
        thread = self._crew.start(call, views)
        if thread is None:
            return False
        self._in_threads.add(thread)
        thread.add_done_callback(self._in_threads.discard)
        await asyncio.wrap_future(thread)
        return True

    def _send_blocking(self, views: list[memoryview]) -> None:
        done = 0
        while done < len(views):
            began = time.monotonic()
            try:
                count = self._sock.sendmsg(views[done : done + MAX_PARTS])
            except BlockingIOError:
                self._wait_blocking(select.POLLOUT, began)
                continue
            except OSError as error:
                raise self._lost(error) from error
            done = _advance(views, done, count)

    def _receive_blocking(self, views: list[memoryview], have: int, arrived: Arrived) -> None:
        done = 0
        while done < len(views):
            began = time.monotonic()
            try:
                count = self._sock.recvmsg_into(_some(views, done), 0, socket.MSG_WAITALL)[0]
            except BlockingIOError:
                self._wait_blocking(select.POLLIN, began)
                continue
            except OSError as error:
                raise self._lost(error) from error
            done = _advance(views, done, self._heard(count))
            have += count
            arrived(have)

    def _wait_blocking(self, event: int, began: float) -> None:
        """In a thread, until the socket is ready, at most until `STALL_S` after ``began``.

        A call that found nothing has waited for so long itself, or not at all: uvloop makes a
        socket non-blocking when it watches it, asyncio leaves it as it is.
        """
        left_s = STALL_S - (time.monotonic() - began)
        poller = select.poll()
        poller.register(self._fd, event)
        if left_s <= 0 or not poller.poll(left_s * 1000):
            raise self._stalled()

    async def _send(self, views: list[memoryview]) -> None:
        done = 0
        while done < len(views):
            try:
                count = self._sock.sendmsg(views[done : done + MAX_PARTS], (), socket.MSG_DONTWAIT)
            except BlockingIOError:
                try:
                    async with asyncio.timeout(STALL_S):
                        await self._ready(self._loop.add_writer, self._loop.remove_writer)
                except TimeoutError:
                    raise self._stalled() from None
                continue
            except OSError as error:
                raise self._lost(error) from error
            done = _advance(views, done, count)

    async def _receive_some(self, views: list[memoryview]) -> int:
        """Wait for bytes; how many of them are in the views now."""
        while True:
            try:
                count = self._sock.recvmsg_into(views[:MAX_PARTS], 0, socket.MSG_DONTWAIT)[0]
            except BlockingIOError:
                await self._ready(self._loop.add_reader, self._loop.remove_reader)
            except OSError as error:
                raise self._lost(error) from error
            else:
                return self._heard(count)

    def _take_ahead(self, views: list[memoryview]) -> list[memoryview]:
        """What is left of the views after what was received ahead."""
        done = 0
        while self._ahead and done < len(views):
            count = min(len(self._ahead), views[done].nbytes)
            views[done][:count] = self._ahead[:count]
            self._ahead = self._ahead[count:]
            done = _advance(views, done, count)
        return views[done:]

    def _heard(self, count: int) -> int:
        if count == 0:
            raise PeerLost(f"{self._where}: the peer closed the connection")
        self.heard_at = time.monotonic()
        return count

    async def _ready(self, add: Callable[..., None], remove: Callable[[int], bool]) -> None:
        waiter = self._loop.create_future()
        self._waiters.add(waiter)
        add(self._fd, _wake, waiter)
        try:
            await waiter
        finally:
            self._waiters.discard(waiter)
            if not self._closed:  # the number of a closed socket may be somebody else's by now
                remove(self._fd)

    def _lost(self, error: OSError) -> PeerLost:
        return PeerLost(f"{self._where}: {error}")

    def _stalled(self) -> DeadlineExceeded:
        return DeadlineExceeded(f"{self._where}: moved no bytes for {STALL_S} s")


def _wake(waiter: "asyncio.Future[None]") -> None:
    if not waiter.done():
        waiter.set_result(None)


def _some(views: list[memoryview], done: int) -> list[memoryview]:
    """The next views, of about `CALL_BYTES` together."""
    taken, size = [], 0
    for view in views[done : done + MAX_PARTS]:
        taken.append(view[: CALL_BYTES - size])
        size += taken[-1].nbytes
        if size >= CALL_BYTES:
            break
    return taken


def _advance(views: list[memoryview], done: int, count: int) -> int:
    """Index of the first view that is not used up after ``count`` more bytes, cut to its rest."""
    while count:
        view = views[done]
        if count < view.nbytes:
            views[done] = view[count:]
            break
        count -= view.nbytes
        done += 1
    return done
