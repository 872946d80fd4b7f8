"""Fixtures of the router's tests."""

import hashlib
import json
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


@pytest.fixture
def tenants_file(tmp_path):
    """Keys of three tenants, one of which may ask seldom."""
    path = tmp_path / "keys.json"
    keys = [
        {"name": n, "tenant": n, "sha256": hashlib.sha256(f"key-{n}".encode()).hexdigest()} | limits
        for n, limits in {"one": {}, "two": {}, "few": {"requests_per_s": 0.001}}.items()
    ]
    path.write_text(json.dumps({"keys": keys}))
    return path
