"""An index over TLS: one server, and servers under Sentinel; nobody is trusted unproved."""

from contextlib import AsyncExitStack
from urllib.parse import quote, urlsplit

import pytest
from certificates import Authority
from indexes import chain_of, node_record, segments, until_fenced
from redis_groups import MASTER, PASSWORD, under_sentinel
from redis_servers import index_at
from tls_front import tls_front

from prefixfleet.store.errors import IndexUnavailable

CHAIN = chain_of("tls", 40)


@pytest.fixture
def authority(tmp_path):
    return Authority(tmp_path, "redis")


def trusting(url, authority):
    return f"{url}{'&' if '?' in url else '?'}ssl_ca_certs={quote(str(authority.file))}"


async def test_an_index_lives_behind_tls_of_a_private_authority(redis_url, authority):
    plain = urlsplit(redis_url)
    async with tls_front(authority.issue("server"), plain.port) as port:
        url = f"rediss://:{plain.password}@127.0.0.1:{port}/0"
        async with index_at(trusting(url, authority)) as index:
            member = await index.join(node_record("a"))
            await index.publish(member, segments(CHAIN))

            assert await index.match(CHAIN) == {"a": 40}


async def test_a_server_of_another_authority_gets_no_password(redis_url, authority, tmp_path):
    plain = urlsplit(redis_url)
    (tmp_path / "other").mkdir()
    other = Authority(tmp_path / "other", "other")
    async with tls_front(other.issue("server"), plain.port) as port:
        url = f"rediss://:{plain.password}@127.0.0.1:{port}/0"
        async with index_at(trusting(url, authority), timeout_s=3) as index:
            with pytest.raises(IndexUnavailable, match="certificate") as refused:
                await index.join(node_record("a"))

    assert plain.password not in str(refused.value)


@pytest.mark.timeout(300)
async def test_a_fleet_under_sentinel_goes_on_over_tls_with_another_primary(tmp_path, authority):
    pair = authority.issue("server")
    with under_sentinel(tmp_path) as group:
        async with AsyncExitStack() as stack:
            fronts = {
                server.port: await stack.enter_async_context(tls_front(pair, server.port))
                for server in group.servers
            }
            seeds = [
                await stack.enter_async_context(tls_front(pair, sentinel.port, fronts))
                for sentinel in group.sentinels
            ]
            hosts = ",".join(f"127.0.0.1:{port}" for port in seeds)
            url = f"rediss+sentinel://:{PASSWORD}@{hosts}/0?master={MASTER}"
            index = await stack.enter_async_context(index_at(trusting(url, authority), timeout_s=3))
            member = await index.join(node_record("a"))
            group.primary.kill()

            await until_fenced(index, member)
            again = await index.join(node_record("a"))
            await index.publish(again, segments(CHAIN))

            assert again.epoch > member.epoch
            assert await index.match(CHAIN) == {"a": 40}
