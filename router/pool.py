"""Idle connections to engines, kept for the next request: the newest first, none for long."""

import asyncio
import ssl
from collections import deque
from dataclasses import dataclass
from urllib.parse import urlsplit

from prefixfleet.router.connection import Connection
from prefixfleet.router.dead_peers import watch

KEEP_ALIVE_S = 4.0
"""Idle connections are closed after this. vLLM and SGLang close theirs after 5 s: be first."""


@dataclass(frozen=True, slots=True)
class Target:
    """Where a worker's base URL points to."""

    host: str
    port: int
    tls: ssl.SSLContext | None
    host_header: str
    base_path: str


class Pool:
    """Owned by the router's event loop. No limit on connections: the router limits requests."""

    def __init__(
        self,
        *,
        connect_timeout_s: float,
        silence_timeout_s: float,
        tls: ssl.SSLContext | None = None,
    ) -> None:
        """``tls`` is for https workers; the system's own trust without it."""
        self._tls = tls or ssl.create_default_context()
        self._connect_timeout_s = connect_timeout_s
        self._silence_timeout_s = silence_timeout_s
        self._idle: dict[str, deque[Connection]] = {}
        self._busy: set[Connection] = set()
        self._targets: dict[str, Target] = {}

    @property
    def busy(self) -> frozenset[Connection]:
        """Connections that serve a request."""
        return frozenset(self._busy)

    def target(self, url: str) -> Target:
        """The parts of ``url``. Raises `ValueError` if it is none of http or https."""
        known = self._targets.get(url)
        if known is None:
            known = self._targets[url] = _target(url, self._tls)
        return known

    def take_idle(self, url: str) -> Connection | None:
        """An idle connection to ``url`` that nobody closed, if there is one."""
        idle = self._idle.get(url)
        oldest_s = asyncio.get_running_loop().time() - KEEP_ALIVE_S
        while idle:
            connection = idle.pop()
            if connection.alive and connection.idle_since_s > oldest_s:
                self._busy.add(connection)
                return connection
            connection.close()
        return None

    async def connect(self, url: str) -> Connection:
        """A new connection. Raises `OSError`, `TimeoutError`."""
        target = self.target(url)
        async with asyncio.timeout(self._connect_timeout_s):
            transport, connection = await asyncio.get_running_loop().create_connection(
                lambda: Connection(self._silence_timeout_s),
                target.host,
                target.port,
                ssl=target.tls,
            )
        watch(transport)
        self._busy.add(connection)
        return connection

    def give_back(self, url: str, connection: Connection) -> None:
        """Keep a connection whose answer is complete; close any other."""
        self._busy.discard(connection)
        if not connection.reusable:
            connection.close()
            return
        connection.rest()
        idle = self._idle.setdefault(url, deque())
        idle.append(connection)
        while idle and idle[0].idle_since_s < connection.idle_since_s - KEEP_ALIVE_S:
            idle.popleft().close()

    def forget(self, url: str) -> None:
        """Close what is idle to a worker that is gone."""
        for connection in self._idle.pop(url, ()):
            connection.close()
        self._targets.pop(url, None)

    def close(self) -> None:
        """Close everything."""
        for url in list(self._idle):
            self.forget(url)
        for connection in list(self._busy):
            connection.close()


def _target(url: str, context: ssl.SSLContext) -> Target:
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ValueError(f"worker URL {url!r}: expected http://host:port")
    tls = context if parts.scheme == "https" else None
    port = parts.port or (443 if tls else 80)
    return Target(parts.hostname, port, tls, parts.netloc, parts.path.rstrip("/"))
