"""`Bursts`: connections that come together are accepted together.

uvloop accepts one connection each turn of its loop (libuv since 1.45), and a turn answers all that
clients of open connections asked meanwhile. Of many that connect at once the last would wait for
as many turns, each longer than the one before: n times n requests, while the first are served
again and again.
"""

import asyncio
import contextlib
import os
import socket
import ssl
from collections.abc import Callable, Sequence

AT_ONCE = 256
"""Connections that are accepted between two looks of the loop at everything else."""


class Bursts:
    """Accepts what else waits at ``sockets``, the listening ones of a server of this loop, whenever
    that server says that it has accepted a connection. Owned by who opened the server, and closed
    before it: until then clients can connect.
    """

    def __init__(
        self,
        sockets: Sequence[socket.socket],
        factory: Callable[[], asyncio.Protocol],
        *,
        tls: ssl.SSLContext | None,
    ) -> None:
        self._listening = [socket.socket(fileno=os.dup(each.fileno())) for each in sockets]
        for listening in self._listening:
            listening.setblocking(False)
        self._factory = factory
        self._tls = tls
        self._loop = asyncio.get_running_loop()
        self._opening: set[asyncio.Task[None]] = set()
        self._look: asyncio.Handle | None = None

    def accepted(self) -> None:
        """The server has accepted one: look for more, at the end of this turn."""
        if self._look is None and self._listening:
            self._look = self._loop.call_soon(self._accept)

    def close(self) -> None:
        """Accept nothing more; connections that are not open yet are dropped."""
        for listening in self._listening:
            listening.close()
        self._listening.clear()
        for task in self._opening:
            task.cancel()

    def _accept(self) -> None:
        self._look = None
        for listening in self._listening:
            for _ in range(AT_ONCE):
                try:
                    connection, _ = listening.accept()
                except OSError:  # nobody waits, or descriptors are used up: the server says so
                    break
                connection.setblocking(False)
                task = self._loop.create_task(self._open(connection))
                self._opening.add(task)
                task.add_done_callback(self._opening.discard)

    async def _open(self, connection: socket.socket) -> None:
        """Hand it to a protocol, as the server does; one that breaks off at once is nobody's."""
        with contextlib.suppress(OSError):
            await self._loop.connect_accepted_socket(self._factory, connection, ssl=self._tls)
