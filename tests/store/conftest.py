"""Fixtures of the store's tests that need a real server."""

import pytest
import redis.asyncio
from redis_servers import running_server

from prefixfleet.store.redis_index import RedisIndex


@pytest.fixture
async def index(redis_url, fleet):
    made = RedisIndex(redis_url, fleet, lease_s=60, timeout_s=20)
    yield made
    await made.close()


@pytest.fixture
async def raw(redis_url):
    """The server, past all of our code."""
    async with redis.asyncio.Redis.from_url(redis_url) as client:
        yield client


@pytest.fixture
def key(fleet):
    """Full name of one of the fleet's keys."""
    return lambda name: f"pf1:{{{fleet}}}:".encode() + name


@pytest.fixture
def own_server(tmp_path):
    """A server for this test alone, on a Unix socket, so that it can come back at its address."""
    with running_server(tmp_path, unix_socket=True) as server:
        yield server
