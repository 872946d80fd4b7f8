"""A router and its clients, as the router's own tests have them."""

from contextlib import AsyncExitStack

import pytest
from chats import write_model
from router_rig import Rig


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory):
    return write_model(tmp_path_factory.mktemp("model"))


@pytest.fixture
async def rig(model_folder, redis_url):
    async with AsyncExitStack() as stack:
        yield Rig(model_folder, stack, redis_url)
