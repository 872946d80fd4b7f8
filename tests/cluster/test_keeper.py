"""The keeper's parts that need no cluster; the rest is tests/system/test_ray_up.py."""

import asyncio
import os

import pytest
from eventually import alive, until

from prefixfleet.cluster.placed import router_service
from prefixfleet.store.errors import ConfigError


@pytest.fixture
def environ(tmp_path):
    secret = tmp_path / "secret"
    secret.write_text("0123456789abcdef" * 4)
    return {
        "PATH": os.environ["PATH"],
        "PREFIXFLEET_SECRET_FILE": str(secret),
        "PREFIXFLEET_REDIS_URL": f"unix://{tmp_path}/no.sock",
        "PREFIXFLEET_ROUTER_PORT": "0",
        "PREFIXFLEET_NODE_RUNTIME_DIR": str(tmp_path),
    }


async def test_a_router_with_a_wrong_setting_says_which(environ):
    """The reason reaches the keeper's log, not only a file on some host."""
    serve = router_service(environ | {"PREFIXFLEET_ROUTER_PROT": "1"})

    with pytest.raises(
        ConfigError, match=r"ended with 2: .*unknown setting PREFIXFLEET_ROUTER_PROT"
    ):
        await serve(lambda described: None, asyncio.Event())


async def test_a_router_ends_in_order_when_its_actor_is_stopped(environ, tmp_path):
    stop, up = asyncio.Event(), asyncio.get_running_loop().create_future()
    serving = asyncio.ensure_future(router_service(environ)(up.set_result, stop))
    described = await up
    log = tmp_path / "logs/router.log"
    await until(lambda: "router on http://" in log.read_text())

    stop.set()
    await asyncio.wait_for(serving, 30)

    assert described["log"] == str(log)
    assert not alive(described["pid"])
