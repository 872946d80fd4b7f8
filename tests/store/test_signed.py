"""Orders in Redis that nobody with the cluster secret gave, or gave once and took back."""

import asyncio
from dataclasses import replace

import pytest
import redis.asyncio

from prefixfleet.store.errors import ConfigError
from prefixfleet.store.records import FleetWish
from prefixfleet.store.registry import WorkerRegistry
from prefixfleet.store.signed import Seals, Unsigned
from prefixfleet.store.worker_orders import WorkerOrders

SECRET, OTHER = b"a secret of thirty-two bytes or so", b"another one of thirty-two bytes.."


def seals(secret=SECRET, fleet="f", kind="wish", now_s=1_000.0):
    return Seals(secret, fleet, kind, lambda: now_s)


@pytest.mark.parametrize("record", [b"", b"x", b"pfs1" * 40])
def test_a_sealed_record_is_opened_by_whoever_has_the_secret(record):
    assert seals().open("a", seals().seal("a", record)) == record


@pytest.mark.parametrize(
    "other",
    [seals(secret=OTHER), seals(fleet="g"), seals(kind="order")],
    ids=["secret", "fleet", "kind"],
)
def test_a_record_of_another_secret_fleet_or_kind_is_refused(other):
    with pytest.raises(Unsigned, match="this cluster's secret"):
        seals().open("a", other.seal("a", b"x"))


def test_a_record_about_another_name_is_refused():
    with pytest.raises(Unsigned):
        seals().open("b", seals().seal("a", b"x"))


def test_every_changed_bit_is_refused():
    sealed = seals().seal("a", b"xy")
    for bit in range(len(sealed) * 8):
        changed = bytearray(sealed)
        changed[bit // 8] ^= 1 << bit % 8
        with pytest.raises(Unsigned):
            seals().open("a", bytes(changed))


@pytest.mark.parametrize("data", [b"", b"\x81\xa7version\x01", b"pfs1", b"pfs1" + b"\0" * 39])
def test_a_record_without_a_seal_is_refused(data):
    with pytest.raises(Unsigned, match="not signed"):
        seals().open("a", data)


def test_an_older_record_is_refused_and_the_same_one_is_not():
    writer, reader = seals(), seals()
    first = writer.seal("a", b"1")
    writer.open("a", first)
    second = writer.seal("a", b"2")

    assert [reader.open("a", sealed) for sealed in (first, second, second)] == [b"1", b"2", b"2"]
    with pytest.raises(Unsigned, match="older"):
        reader.open("a", first)


def test_what_was_withdrawn_does_not_come_back():
    reader, first = seals(), seals().seal("a", b"1")
    reader.open("a", first)
    reader.only(["b"])

    with pytest.raises(Unsigned, match="older"):
        reader.open("a", first)
    assert reader.open("a", seals(now_s=1_001.0).seal("a", b"2")) == b"2"


def test_numbers_rise_though_the_clock_is_set_back():
    reader, late = seals(now_s=9_000.0), seals(now_s=9_000.0).seal("a", b"1")
    reader.open("a", late)
    back = seals(now_s=1.0)
    back.open("a", late)

    assert reader.open("a", back.seal("a", b"2")) == b"2"


@pytest.fixture
async def raw(redis_url):
    async with redis.asyncio.Redis.from_url(redis_url) as client:
        yield client


@pytest.fixture
async def orders(redis_url, fleet):
    made = WorkerOrders(redis_url, fleet, SECRET, timeout_s=20)
    yield made
    await made.close()


@pytest.fixture
async def registry(redis_url, fleet):
    made = WorkerRegistry(redis_url, fleet, secret=SECRET, timeout_s=20)
    yield made
    await made.close()


def key(fleet, name):
    return f"pf1:{{{fleet}}}:{name}"


async def test_orders_are_read_as_they_were_given(orders):
    await orders.give("a", b"1")
    await orders.give("a", b"2")
    await orders.give("b", b"3")

    assert await orders.all() == {"a": b"2", "b": b"3"}
    await orders.withdraw("a")
    assert await orders.all() == {"b": b"3"}
    assert orders.refused == {}


async def test_forged_and_replayed_orders_are_refused_and_can_be_given_again(orders, raw, fleet):
    await orders.give("a", b"old")
    old = await raw.hget(key(fleet, "worker_orders"), "a")
    await orders.all()
    await orders.give("a", b"new")
    await orders.all()
    forged = {"a": old, "b": b'{"state":"removed"}', "c": seals(OTHER, fleet).seal("c", b"x")}
    await raw.hset(key(fleet, "worker_orders"), mapping=forged)

    assert await orders.all() == {}
    assert {name: why.split(" is ")[1][:12] for name, why in orders.refused.items()} == {
        "a": "an older one", "b": "not signed; ", "c": "not signed w",
    }  # fmt: skip
    await orders.give("a", b"again")
    assert await orders.all() == {"a": b"again"}
    assert set(orders.refused) == {"b", "c"}


def test_what_was_written_late_is_no_newer_than_what_was_seen_meanwhile():
    writer = seals()
    late, newer = writer.seal("a", b"1"), seals(now_s=2_000.0).seal("a", b"2")
    writer.open("a", newer)

    writer.wrote("a", late)

    assert writer.open("a", newer) == b"2"
    with pytest.raises(Unsigned, match="older"):
        writer.open("a", late)


async def test_who_gave_an_order_has_seen_it(orders, registry, raw, fleet):
    """It has not been read again yet when an older one is put back."""
    await orders.give("a", b"old")
    old = await raw.hget(key(fleet, "worker_orders"), "a")
    await orders.give("a", b"new")
    await raw.hset(key(fleet, "worker_orders"), "a", old)
    assert await orders.all() == {}

    await registry.change_wish(lambda _: FleetWish(nodes=1))
    first = await raw.hget(key(fleet, "wish"), "record")
    await registry.change_wish(lambda _: FleetWish(nodes=5))
    await raw.hset(key(fleet, "wish"), "record", first)
    with pytest.raises(ConfigError, match="older"):
        await registry.wish()


async def test_whoever_forges_an_order_writes_no_lines_of_his_own(orders, raw, fleet):
    name = "a\nERROR all is lost \x1b[2J" + "x" * 100_000
    await raw.hset(key(fleet, "worker_orders"), name, b"forged")

    await orders.all()

    (why,) = orders.refused.values()
    assert why.isprintable()
    assert len(why) < 300


async def test_two_who_order_at_the_same_time_agree_on_the_later_one(orders, redis_url, fleet):
    """One of their clocks is an hour ahead."""
    other = WorkerOrders(redis_url, fleet, SECRET, timeout_s=20)
    other._seals._clock = lambda: orders._seals._clock() + 3_600
    await other.give("a", b"1")
    await orders.give("a", b"2")

    assert await orders.all() == await other.all() == {"a": b"2"}
    await other.close()


async def test_what_is_ordered_while_all_is_read_holds(orders):
    names = [f"w{number}" for number in range(30)]
    for name in names:
        await asyncio.gather(orders.all(), orders.give(name, b"drain"), orders.all())

    assert await orders.all() == dict.fromkeys(names, b"drain")
    assert orders.refused == {}


async def test_a_first_wish_that_is_written_while_it_is_read_holds(registry, raw, fleet):
    for number in range(30):
        await raw.delete(key(fleet, "wish"))
        await registry.wish()
        wished = registry.change_wish(lambda wish, n=number: replace(wish, nodes=n + 1))
        await asyncio.gather(registry.wish(), wished, registry.wish())

        assert (await registry.wish()).nodes == number + 1


@pytest.mark.parametrize("secret", [None, OTHER])
async def test_a_forged_wish_is_refused_and_replaced(registry, raw, fleet, secret):
    wish = FleetWish(nodes=99, most=99, least=50)
    record = seals(secret, fleet).seal("", wish.encode()) if secret else wish.encode()
    await raw.hset(key(fleet, "wish"), mapping={"generation": 7, "record": record})

    with pytest.raises(ConfigError, match="not signed"):
        await registry.wish()
    await registry.change_wish(lambda before: replace(before, nodes=before.nodes))
    assert await registry.wish() == FleetWish()


async def test_an_older_wish_is_refused_by_who_saw_a_newer_one(registry, raw, fleet):
    await registry.change_wish(lambda _: FleetWish(nodes=1))
    old = await raw.hget(key(fleet, "wish"), "record")
    await registry.change_wish(lambda _: FleetWish(nodes=5))
    await registry.wish()
    await raw.hset(key(fleet, "wish"), "record", old)

    with pytest.raises(ConfigError, match="older"):
        await registry.wish()


async def test_an_emptied_redis_is_no_wish_to_who_saw_none(registry, raw, fleet, redis_url):
    await registry.change_wish(lambda _: FleetWish(nodes=4))
    await raw.delete(key(fleet, "wish"))
    newcomer = WorkerRegistry(redis_url, fleet, secret=SECRET, timeout_s=20)

    assert await newcomer.wish() == FleetWish()
    await newcomer.change_wish(lambda _: FleetWish(nodes=2))

    assert (await newcomer.wish()).nodes == (await registry.wish()).nodes == 2
    await newcomer.close()


async def test_without_the_secret_no_wish_is_read_or_written(redis_url, fleet):
    registry = WorkerRegistry(redis_url, fleet, timeout_s=20)
    with pytest.raises(ConfigError, match="PREFIXFLEET_SECRET_FILE"):
        await registry.wish()
    with pytest.raises(ConfigError, match="PREFIXFLEET_SECRET_FILE"):
        await registry.change_wish(lambda _: FleetWish(nodes=2))
    await registry.close()
