"""A real Redis-compatible server for the tests: one a session, a fleet of its own for each test."""

import secrets
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

from prefixfleet.store.redis_functions import RedisFunctions
from prefixfleet.store.redis_index import RedisIndex
from prefixfleet.store.redis_server import RedisServer


@contextmanager
def running_server(folder: Path, **options: Any) -> Iterator[RedisServer]:
    """A server, by default on the loopback address, stopped at the end."""
    with RedisServer.start(folder, password=secrets.token_urlsafe(16), **options) as server:
        yield server


class ForgetfulServer:
    """A server without persistence that comes back, empty, at its address. Owned by the test."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._password = secrets.token_urlsafe(16)
        self.running = self._start()
        self.clients: list[RedisFunctions] = []  # else each finds out by one call that fails

    @property
    def url(self) -> str:
        return self.running.url

    async def lose_its_memory(self) -> None:
        """kill -9, and a new one."""
        self.running._process.kill()
        self.running.stop()
        self.running = self._start()
        for client in self.clients:
            await client.redis.connection_pool.disconnect()

    def _start(self) -> RedisServer:
        return RedisServer.start(self._folder, password=self._password, unix_socket=True)


@contextmanager
def forgetful_server(folder: Path) -> Iterator[ForgetfulServer]:
    """Stopped at the end."""
    server = ForgetfulServer(folder)
    try:
        yield server
    finally:
        server.running.stop()


def new_fleet() -> str:
    """A name that no other test uses."""
    return f"test-{secrets.token_hex(6)}"


@asynccontextmanager
async def index_at(url: str, **options: Any) -> AsyncIterator[RedisIndex]:
    """An index with times long enough for a busy machine, closed at the end."""
    index = RedisIndex(url, "f", **{"lease_s": 60, "timeout_s": 20} | options)
    try:
        yield index
    finally:
        await index.close()
