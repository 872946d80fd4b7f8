"""A real Redis-compatible server for the tests: one a session, a fleet of its own for each test."""

import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from prefixfleet.store.redis_server import RedisServer


@contextmanager
def running_server(folder: Path, **options: Any) -> Iterator[RedisServer]:
    """A server, by default on the loopback address, stopped at the end."""
    with RedisServer.start(folder, password=secrets.token_urlsafe(16), **options) as server:
        yield server


def new_fleet() -> str:
    """A name that no other test uses."""
    return f"test-{secrets.token_hex(6)}"
