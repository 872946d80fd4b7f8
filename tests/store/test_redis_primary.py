"""An index behind Sentinel, or on a shard of a cluster: it goes on when the primary is another."""

import asyncio

import pytest
from eventually import until
from indexes import chain_of, node_record, segments, until_fenced
from redis_groups import cluster, under_sentinel
from redis_servers import index_at

from prefixfleet.store.errors import ConfigError, Fenced, IndexUnavailable
from prefixfleet.store.index import StreamGap
from prefixfleet.store.redis_index import RedisIndex
from prefixfleet.store.redis_primary import Seeds

CHAIN = chain_of("primary", 40)
SECRET = "p%40ss"


@pytest.fixture(scope="module")
def shards(tmp_path_factory):
    with cluster(tmp_path_factory.mktemp("cluster")) as running:
        yield running


async def joined_again(index):
    """The membership of a new life, as soon as there is a primary that takes it."""

    async def join():
        try:
            return await index.join(node_record("a"))
        except IndexUnavailable:
            return None

    return await until(join, 60)


@pytest.mark.timeout(300)
async def test_after_a_failover_a_node_joins_anew_and_a_reader_starts_over(tmp_path):
    with under_sentinel(tmp_path) as group:
        async with index_at(group.url, timeout_s=10) as index, index_at(group.url) as reader:
            member = await index.join(node_record("a"))
            await index.publish(member, segments(CHAIN))
            snapshot = await reader.snapshot()
            assert len(snapshot.holders) == len(CHAIN)
            following = reader.follow(snapshot.cursor)
            group.primary.kill()

            with pytest.raises((StreamGap, IndexUnavailable)) as ended:
                async for _ in following:
                    pass
            again = await joined_again(index)

            assert "Redis" in str(ended.value) or "moved" in str(ended.value)
            assert again.epoch > member.epoch
            with pytest.raises(Fenced):
                await index.renew(member, node_record("a"))
            await index.publish(again, segments(CHAIN))
            assert await reader.match(CHAIN) == {"a": 40}
            with pytest.raises(StreamGap, match="another server"):
                async for _ in reader.follow(snapshot.cursor):
                    pass


async def test_a_life_does_not_go_on_with_a_primary_that_took_over_though_it_knows_it(tmp_path):
    """The replica has it all, but nobody can tell that."""
    with under_sentinel(tmp_path) as group:
        async with index_at(group.url, timeout_s=10) as index:
            member = await index.join(node_record("a"))
            old = group.primary
            group.sentinels[0].ask("SENTINEL", "FAILOVER", "fleet")
            await until(lambda: group.primary is not old, 60)

            await until_fenced(index, member)


async def test_a_sentinel_that_is_gone_is_passed_over(tmp_path):
    with under_sentinel(tmp_path) as group:
        group.sentinels[0].kill()
        async with index_at(group.url) as index:
            assert (await index.join(node_record("a"))).epoch


async def test_a_master_that_no_sentinel_knows_is_a_wrong_setting(tmp_path):
    with under_sentinel(tmp_path) as group:
        async with index_at(group.url.replace("=fleet", "=fleat")) as index:
            with pytest.raises(ConfigError, match=r"knows no master 'fleat'.*REDIS_URL"):
                await index.prepare()


async def test_all_of_a_fleet_is_on_one_shard_and_fleets_are_spread(shards):
    async def held_by(fleet):
        index = RedisIndex(shards.url, fleet, lease_s=60, timeout_s=20)
        try:
            member = await index.join(node_record("a"))
            await index.publish(member, segments(CHAIN))
            assert await index.match(CHAIN) == {"a": 40}
            assert len((await index.snapshot()).holders) == len(CHAIN)
        finally:
            await index.close()
        [server] = shards.holding(f"pf1:{{{fleet}}}:*")
        return server.port

    assert len({await held_by(f"fleet-{number}") for number in range(6)}) == 2


async def test_after_a_shard_has_another_primary_the_fleet_goes_on_there(shards):
    async with index_at(shards.url, timeout_s=10) as index:
        member = await index.join(node_record("a"))
        [old] = shards.holding("pf1:{f}:*")
        shards.replica_of(old).ask("CLUSTER", "FAILOVER")
        await until(lambda: b"role:slave" in old.ask("INFO", "replication"), 60)

        await until_fenced(index, member)

        assert (await joined_again(index)).epoch > member.epoch


async def test_a_server_that_is_in_no_cluster_is_a_wrong_setting(redis_url):
    async with index_at(redis_url.replace("redis://", "redis+cluster://")) as index:
        with pytest.raises(ConfigError, match=r"not part of a cluster.*REDIS_URL"):
            await index.prepare()


async def test_seeds_that_nobody_listens_at_are_named_without_the_password():
    url = f"redis+sentinel://:{SECRET}@127.0.0.1:1,127.0.0.1:2/0?master=m&sentinel_password=s3"
    async with index_at(url) as index:
        with pytest.raises(IndexUnavailable, match=r"127\.0\.0\.1:1,127\.0\.0\.1:2") as refused:
            await asyncio.wait_for(index.members(), 60)

    assert not {"p%40ss", "p@ss", "s3"} & set(str(refused.value).split())


@pytest.mark.parametrize(
    "url",
    [
        f"redis+sentinel://:{SECRET}@h:1/0",  # which master?
        f"redis+cluster://:{SECRET}@h:1/3",  # a cluster has database 0
        f"redis+cluster://:{SECRET}@h:1?master=m",
        f"redis+cluster://:{SECRET}@h:99999",
        f"redis+cluster://:{SECRET}@h:1,",
        f"redis+ring://:{SECRET}@h:1",
        f"http+sentinel://:{SECRET}@h:1?master=m",
        f"redis+sentinel://:{SECRET}@h:1/0?master=m&no_such_option=1",
    ],
)
def test_a_wrong_url_says_what_is_expected_and_not_what_it_held(url):
    with pytest.raises(ConfigError, match=r"redis\+sentinel://.*PREFIXFLEET_REDIS_URL") as refused:
        RedisIndex(url, "f")

    assert SECRET not in str(refused.value)


def test_credentials_go_to_those_they_are_for():
    sentinel = Seeds.of("rediss+sentinel://u:p@[::1],h:5/2?master=m&sentinel_password=s%20s")
    shard = Seeds.of("redis+cluster://u:p@h")

    assert sentinel.ask == ("rediss://:s%20s@[::1]:26379", "rediss://:s%20s@h:5")
    assert sentinel.plain == "rediss://u:p@sentinel/2"
    assert shard.ask == ("redis://u:p@h:6379",)
    assert Seeds.of("redis://h:1") is None
