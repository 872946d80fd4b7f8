"""A real Redis-compatible server for the tests: one a session, a fleet of its own for each test."""

import secrets
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

from prefixfleet.store.redis_index import RedisIndex
from prefixfleet.store.redis_server import RedisServer


@contextmanager
def running_server(folder: Path, **options: Any) -> Iterator[RedisServer]:
    """A server, by default on the loopback address, stopped at the end."""
    with RedisServer.start(folder, password=secrets.token_urlsafe(16), **options) as server:
        yield server


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
