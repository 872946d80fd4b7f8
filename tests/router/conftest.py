"""Fixtures of the router's tests."""

from contextlib import AsyncExitStack

import pytest
from chats import write_model
from clocks import ManualClock
from router_rig import Rig


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory):
    return write_model(tmp_path_factory.mktemp("model"))


@pytest.fixture
async def rig(model_folder, redis_url):
    async with AsyncExitStack() as stack:
        yield Rig(model_folder, stack, redis_url)


@pytest.fixture
def clock():
    return ManualClock()
