"""`Stream`: whole buffers over one non-blocking TCP socket, straight from and into memory.

Must not know frames. `loop.sock_recv_into` alone would do for one buffer; scattered slots want
`recvmsg_into` and `sendmsg`, for which asyncio has nothing.
"""

import asyncio
import contextlib
import socket
import time
from collections.abc import Callable, Sequence

from prefixfleet.store.errors import DeadlineExceeded, PeerLost

MAX_PARTS = 128
"""Buffers a system call; the kernel's own limit is 1024."""
YIELD_BYTES = 8 * 1024 * 1024
"""Others on the event loop get their turn at least this often."""
USER_TIMEOUT_MS = 10_000
"""Unacknowledged data for so long: the kernel gives the connection up."""


def tune(sock: socket.socket) -> None:
    """What every peer connection wants: no delays, no waiting for a dead host."""
    sock.setblocking(False)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, USER_TIMEOUT_MS)


class Stream:
    """One connected socket. Owned by one connection on one event loop; one task receives, any
    may send. Every call raises `PeerLost` when the connection is gone."""

    def __init__(self, sock: socket.socket, where: str) -> None:
        self._sock = sock
        self._where = where
        self._loop = asyncio.get_running_loop()
        self._sending = asyncio.Lock()
        self._waiters: set[asyncio.Future[None]] = set()
        self._closed = False
        self.heard_at = time.monotonic()  # when bytes last came

    async def send(self, *parts: bytes | memoryview, stall_s: float | None = None) -> None:
        """Send all of ``parts``, not mixed with what others send.

        A send that does not end leaves the peer with half a frame: close the stream after it.
        With ``stall_s``, raises `DeadlineExceeded` when not a byte could be sent for so long.
        """
        views = [memoryview(part) for part in parts if len(part)]
        async with self._sending:
            done = since_yield = 0
            while done < len(views):
                try:
                    count = self._sock.sendmsg(views[done : done + MAX_PARTS])
                except BlockingIOError:
                    await self._ready(self._loop.add_writer, self._loop.remove_writer, stall_s)
                    continue
                except OSError as error:
                    raise self._lost(error) from error
                done = _advance(views, done, count)
                since_yield = await self._give_way(since_yield + count)

    async def receive(self, count: int) -> bytearray:
        """The next ``count`` bytes."""
        buffer = bytearray(count)
        await self.receive_into([memoryview(buffer)])
        return buffer

    async def receive_into(self, targets: Sequence[memoryview]) -> None:
        """Fill the targets, in order, with the next bytes."""
        views = [target for target in targets if target.nbytes]
        done = since_yield = 0
        while done < len(views):
            try:
                count = self._sock.recvmsg_into(views[done : done + MAX_PARTS])[0]
            except BlockingIOError:
                await self._ready(self._loop.add_reader, self._loop.remove_reader, None)
                continue
            except OSError as error:
                raise self._lost(error) from error
            if count == 0:
                raise PeerLost(f"{self._where}: the peer closed the connection")
            self.heard_at = time.monotonic()
            done = _advance(views, done, count)
            since_yield = await self._give_way(since_yield + count)

    def close(self) -> None:
        """Drop the connection; whoever waits gets `PeerLost`. Repeated calls do nothing."""
        if self._closed:
            return
        self._closed = True
        self._loop.remove_reader(self._sock)
        self._loop.remove_writer(self._sock)
        for waiter in self._waiters:
            if not waiter.done():
                waiter.set_exception(self._lost(OSError("closed on this side")))
        self._sock.close()

    async def _ready(
        self,
        add: Callable[..., None],
        remove: Callable[[socket.socket], bool],
        stall_s: float | None,
    ) -> None:
        waiter = self._loop.create_future()
        self._waiters.add(waiter)
        add(self._sock, _wake, waiter)
        try:
            async with asyncio.timeout(stall_s):
                await waiter
        except TimeoutError:
            raise DeadlineExceeded(f"{self._where}: took no bytes for {stall_s} s") from None
        finally:
            self._waiters.discard(waiter)
            if not self._closed:  # the number of a closed socket may be somebody else's by now
                remove(self._sock)

    async def _give_way(self, moved: int) -> int:
        if moved < YIELD_BYTES:
            return moved
        await asyncio.sleep(0)
        return 0

    def _lost(self, error: OSError) -> PeerLost:
        return PeerLost(f"{self._where}: {error}")


def _wake(waiter: "asyncio.Future[None]") -> None:
    if not waiter.done():
        waiter.set_result(None)


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


async def dial(host: str, port: int, where: str) -> Stream:
    """Connect to the first address of ``host`` that answers. Raises `PeerLost`."""
    loop = asyncio.get_running_loop()
    last: OSError = OSError("no address")
    try:
        found = await loop.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except OSError as error:
        raise PeerLost(f"{where}: {error}") from error
    for family, kind, protocol, _, address in found:
        with contextlib.ExitStack() as undo:
            try:
                sock = undo.enter_context(socket.socket(family, kind, protocol))
                tune(sock)
                await loop.sock_connect(sock, address)
            except OSError as error:
                last = error
                continue
            undo.pop_all()
            return Stream(sock, where)
    raise PeerLost(f"{where}: {last}") from last
