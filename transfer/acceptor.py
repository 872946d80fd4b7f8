"""`Acceptor`: a listening TCP socket whose connections are peer sessions."""

import asyncio
import logging
import secrets
import socket
from typing import Self

from prefixfleet.store.errors import ConfigError
from prefixfleet.transfer.contact import format_contact
from prefixfleet.transfer.dial import tune
from prefixfleet.transfer.session import Served, serve_session
from prefixfleet.transfer.stream import Stream

log = logging.getLogger(__name__)

MAX_SESSIONS = 1024
"""Connections at once; one more is dropped before a word is said."""


class Acceptor:
    """Fulfils `Listener`. Owned by the event loop that opened it."""

    def __init__(self, sock: socket.socket, contact: str, served: Served) -> None:
        self.contact = contact
        self._sock = sock
        self._served = served
        self._sessions: set[asyncio.Task[None]] = set()
        self._accepting = asyncio.create_task(self._accept())

    @classmethod
    async def open(cls, host: str, port: int, served: Served) -> Self:
        """Listen on the first usable address of ``host``; ``port`` 0 takes a free one.

        Raises `ConfigError`.
        """
        sock = await _bind(host, port, served.link)
        contact = format_contact(served.link, host, sock.getsockname()[1])
        return cls(sock, contact, served)

    async def close(self) -> None:
        """See `Listener`."""
        self._accepting.cancel()
        for session in self._sessions:
            session.cancel()
        await asyncio.gather(self._accepting, *self._sessions, return_exceptions=True)
        self._sock.close()

    async def _accept(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            try:
                sock, address = await loop.sock_accept(self._sock)
            except OSError as error:  # out of descriptors, or the caller went away again
                log.warning("%s: accept failed: %s", self.contact, error)
                await asyncio.sleep(0.1)
                continue
            if len(self._sessions) >= MAX_SESSIONS:
                self._served.counters["too_many"] += 1
                sock.close()
                continue
            tune(sock)
            stream = Stream(sock, f"{self._served.link} caller {address[0]}", self._served.crew)
            session = asyncio.create_task(serve_session(stream, secrets.randbits(63), self._served))
            self._sessions.add(session)
            session.add_done_callback(self._sessions.discard)


async def _bind(host: str, port: int, link: str) -> socket.socket:
    last: OSError = OSError("no address")
    try:
        found = await asyncio.get_running_loop().getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )
    except OSError as error:
        found, last = [], error
    for family, kind, protocol, _, address in found:
        sock = socket.socket(family, kind, protocol)
        try:
            sock.setblocking(False)
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            sock.bind(address)
            sock.listen(128)
        except OSError as error:
            sock.close()
            last = error
        else:
            return sock
    raise ConfigError(
        f"{link} link: cannot listen on {host} port {port}: {last}; set PREFIXFLEET_NODE_HOST to "
        "an address of this host that its peers reach, PREFIXFLEET_NODE_PORT to a free port or 0"
    ) from last
