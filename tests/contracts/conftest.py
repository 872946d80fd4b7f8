"""Fixtures of the contracts: every backend of an interface, one after the other."""

import pytest
from indexes import Backend, MemoryBackend, RedisBackend


@pytest.fixture(params=["memory", "redis"])
async def backend(request):
    made: Backend = MemoryBackend()
    if request.param == "redis":
        made = RedisBackend(*map(request.getfixturevalue, ("redis_url", "fleet")))
    yield made
    await made.close()


@pytest.fixture
def index(backend):
    return backend.index
