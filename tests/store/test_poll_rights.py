"""The right to poll an engine, in a real server: one router has it, until it stays away."""

import pytest
from eventually import until

from prefixfleet.store.errors import IndexUnavailable
from prefixfleet.store.poll_rights import PollRights

ENGINE, OTHER = "http://e:1", "http://e:2"


@pytest.fixture
async def rights(redis_url, fleet):
    made = [PollRights(redis_url, fleet, name, timeout_s=20) for name in ("one", "two words")]
    yield made
    for right in made:
        await right.close()


async def test_one_router_has_it_and_each_engine_has_its_own(rights):
    one, two = rights

    assert await one.claim(ENGINE)
    assert not await two.claim(ENGINE)
    assert await two.claim(OTHER)
    assert await one.claim(ENGINE)
    assert not await one.claim(OTHER)


async def test_who_does_not_come_back_loses_it(rights):
    one, two = rights
    await one.claim(ENGINE, ttl_s=0.05)

    await until(lambda: two.claim(ENGINE))

    assert not await one.claim(ENGINE)


async def test_without_a_server_nobody_can_say(fleet):
    right = PollRights("redis://127.0.0.1:1/0", fleet, "one", timeout_s=0.2)

    with pytest.raises(IndexUnavailable):
        await right.claim(ENGINE)
    await right.close()
