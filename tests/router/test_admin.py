"""The admin API: its key, draining, taking out and adding workers, on every router at once."""

from typing import ClassVar

import pytest
import redis.asyncio
from aiohttp import web
from eventually import until
from router_rig import Rig
from static_entries import entry

from prefixfleet.router.admin_key import AdminKey
from prefixfleet.router.orders import FORGOTTEN_S, Order, Orders
from prefixfleet.store.errors import ConfigError, IndexUnavailable

KEY = "the key of the operators"
HEADERS = {"Authorization": f"Bearer {KEY}"}


@pytest.fixture
def key_file(tmp_path):
    path = tmp_path / "admin-key"
    path.write_text(KEY + "\n")
    return path


async def admin(rig, method, path, headers=HEADERS, **body):
    async with rig.client.request(
        method, f"/admin/workers{path}", headers=headers, json=body or None
    ) as response:
        return response.status, await response.json()


async def states(rig):
    _, answer = await admin(rig, "GET", "")
    return {w["worker"]: w["state"] for w in answer["workers"]}


async def test_without_a_key_file_there_is_no_admin(rig):
    await rig.start(await rig.engine())

    status, answer = await admin(rig, "GET", "")

    assert status == 403
    assert "PREFIXFLEET_ROUTER_ADMIN_KEY_FILE" in answer["error"]["message"]


@pytest.mark.parametrize(
    "headers", [{}, {"Authorization": "Bearer wrong"}, {"Authorization": f"Basic {KEY}"}]
)
@pytest.mark.parametrize(
    ("method", "path"),
    [("GET", ""), ("POST", ""), ("POST", "/a/drain"), ("POST", "/a/flush"), ("DELETE", "/a")],
)
async def test_another_key_is_refused(rig, key_file, headers, method, path):
    await rig.start(await rig.engine(), admin_key_file=key_file)

    status, answer = await admin(rig, method, path, headers=headers)

    assert (status, answer["error"]["code"]) == (401, "invalid_api_key")
    assert KEY not in str(answer)
    assert rig.router.roster.standings()[0].state == "ready"


async def test_a_drained_worker_gets_no_new_requests_until_it_is_resumed(rig, key_file):
    engines = [await rig.engine(name) for name in "ab"]
    await rig.start(*engines, admin_key_file=key_file)

    status, worker = await admin(rig, "POST", "/a/drain")
    answers = [await rig.post() for _ in range(6)]

    assert (status, worker["state"], worker["in_flight"]) == (200, "draining", 0)
    assert {headers["x-prefixfleet-node"] for _, headers, _ in answers} == {"node-b"}
    await admin(rig, "POST", "/b/drain")
    assert (await rig.post())[0] == 503
    status, worker = await admin(rig, "POST", "/a/resume")
    assert (status, worker["state"]) == (200, "ready")
    assert (await rig.post())[0] == 200


async def test_what_is_in_flight_on_a_drained_worker_is_shown_and_ends(rig, key_file):
    import asyncio

    go = asyncio.Event()

    async def slow(engine, request, asked):
        await go.wait()
        return web.json_response({"choices": []})

    await rig.start(await rig.engine(behave=slow), admin_key_file=key_file)
    asked = asyncio.create_task(rig.post())
    await until(lambda: rig.router.book.load("a").queued_requests == 1)

    _, worker = await admin(rig, "POST", "/a/drain")
    assert worker["in_flight"] == 1
    go.set()
    status, _, _ = await asked

    assert status == 200
    assert (await admin(rig, "GET", ""))[1]["workers"][0]["in_flight"] == 0


async def test_every_router_obeys(rig, key_file, model_folder, redis_url):
    """A drain that one of several replicas knows of is none."""
    engine = await rig.engine()
    await rig.start(engine, admin_key_file=key_file)
    other = Rig(model_folder, rig.stack, redis_url, fleet=rig.fleet)
    await other.start(engine, admin_key_file=key_file)

    await admin(rig, "POST", "/a/drain")
    await until(lambda: other.router.roster.standings()[0].state == "draining")
    await admin(other, "DELETE", "/a")
    await until(lambda: not rig.router.roster.standings())
    status, _ = await admin(rig, "POST", "/a/resume")

    assert status == 200
    await other.until_ready(1)


async def test_a_plain_engine_can_be_added_and_removed(rig, key_file):
    engine = await rig.engine("p", plain=True)
    await rig.start(records=[], admin_key_file=key_file)

    status, worker = await admin(rig, "POST", "", **entry(engine))
    assert (status, worker["worker"], worker["state"]) == (201, "p", "checking")
    await rig.until_ready(1)
    assert (await rig.post())[0] == 200
    status, answer = await admin(rig, "POST", "", **entry(engine))
    assert (status, answer["error"]["code"]) == (409, "conflict")
    status, _ = await admin(rig, "DELETE", "/p")
    assert status == 200

    assert await states(rig) == {}
    assert await rig.router.orders._store.all() == {}


@pytest.mark.parametrize(
    ("method", "path", "body", "status", "code"),
    [
        ("POST", "/nobody/drain", {}, 404, "not_found"),
        ("POST", "/nobody/resume", {}, 404, "not_found"),
        ("POST", "/nobody/flush", {}, 404, "not_found"),
        ("DELETE", "/nobody", {}, 404, "not_found"),
        ("POST", "", {"name": "x"}, 400, "invalid_request"),
        ("POST", "", {"name": "../x"}, 400, "invalid_request"),
        ("PUT", "", {}, 405, "invalid_request"),
    ],
)
async def test_wrong_requests_are_explained(rig, key_file, method, path, body, status, code):
    await rig.start(await rig.engine(), admin_key_file=key_file)

    got, answer = await admin(rig, method, path, **body)

    assert (got, answer["error"]["code"]) == (status, code)


async def test_flush_asks_the_engine_in_its_own_way(rig, key_file):
    engine = await rig.engine()
    flushed = []

    async def flush(request):
        flushed.append(request.path)
        return web.Response()

    app = web.Application()
    app.router.add_post("/flush_cache", flush)
    runner = web.AppRunner(app)
    await runner.setup()
    rig.stack.push_async_callback(runner.cleanup)
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    await rig.start(engine, admin_key_file=key_file)
    assert (await admin(rig, "POST", "/a/flush"))[0] == 501
    url = f"http://127.0.0.1:{runner.addresses[0][1]}"
    seat = rig.router.roster._seats["a"]
    seat.record = engine.record(url=url)

    status, answer = await admin(rig, "POST", "/a/flush")

    assert (status, answer["flushed"], flushed) == (200, True, ["/flush_cache"])


async def test_without_redis_an_order_is_refused_and_changes_nothing(rig, key_file):
    router = await rig.start(await rig.engine(), admin_key_file=key_file)
    router.orders._store = None

    status, answer = await admin(rig, "POST", "/a/drain")

    assert (status, answer["error"]["code"]) == (503, "orders_unavailable")
    assert router.roster.standings()[0].state == "ready"


class Kept(dict[str, bytes]):
    """Orders in memory, with the store's interface."""

    refused: ClassVar[dict[str, str]] = {}

    async def give(self, worker, order):
        self[worker] = order

    async def withdraw(self, worker):
        self.pop(worker, None)

    async def all(self):
        return dict(self)


async def test_an_order_about_a_worker_that_left_is_forgotten_after_a_while(clock):
    kept = Kept()
    orders = Orders(kept, clock)
    await orders.give("a", Order(state="draining"))
    await orders.forget_unseen([])
    clock.advance(FORGOTTEN_S / 2)
    await orders.forget_unseen(["a"])
    clock.advance(FORGOTTEN_S)
    await orders.forget_unseen([])
    assert orders.of("a").state == "draining"

    clock.advance(FORGOTTEN_S + 1)
    await orders.forget_unseen([])

    assert orders.of("a") == Order()
    assert kept == {}


async def test_junk_among_the_orders_is_ignored(clock):
    orders = Orders(Kept(a=b"\xff", b=b'{"state":"gone"}', c=b'{"state":"draining"}'), clock)

    await orders.read()

    assert [orders.of(name).state for name in "abc"] == ["ready", "ready", "draining"]


async def test_orders_need_a_store(clock):
    with pytest.raises(IndexUnavailable):
        await Orders(None, clock).give("a", Order(state="draining"))


@pytest.mark.parametrize("content", [b"short", None])
def test_a_key_that_cannot_be_used_stops_the_start(tmp_path, content):
    path = tmp_path / "key"
    if content:
        path.write_bytes(content)

    with pytest.raises(ConfigError, match="PREFIXFLEET_ROUTER_ADMIN_KEY_FILE"):
        AdminKey(path).load()


async def test_a_key_that_was_exchanged_opens_nothing_any_more(rig, key_file):
    router = await rig.start(await rig.engine(), admin_key_file=key_file)

    key_file.write_text("another key of the operators")
    router.reload()

    assert (await admin(rig, "GET", ""))[0] == 401
    new = {"Authorization": "Bearer another key of the operators"}
    assert (await admin(rig, "GET", "", headers=new))[0] == 200


async def test_a_key_file_that_became_useless_leaves_the_key_and_is_said(rig, key_file):
    router = await rig.start(await rig.engine(), admin_key_file=key_file)

    key_file.write_text("short")
    router.reload()

    assert (await admin(rig, "GET", ""))[0] == 200
    assert "admin key" in {mode.name for mode in router.degraded.modes()}


async def test_a_client_key_header_is_not_taken_for_the_admin_key(rig, key_file):
    await rig.start(await rig.engine(), admin_key_file=key_file)

    status, _ = await admin(rig, "GET", "", headers={"X-Api-Key": KEY})

    assert status == 401


async def test_a_forged_order_is_not_obeyed_and_said(rig, redis_url):
    """Whoever may write to Redis adds a worker of its own and takes ours away."""
    engine = await rig.engine()
    router = await rig.start(engine)
    async with redis.asyncio.Redis.from_url(redis_url) as raw:
        await raw.hset(f"pf1:{{{rig.fleet}}}:worker_orders", "a", b'{"state":"removed"}')

    await until(lambda: any(mode.name == "orders" for mode in router.degraded.modes()))
    assert (await rig.post())[0] == 200
    metrics = await (await rig.client.get("/metrics")).text()
    assert "prefixfleet_refused_orders 1.0" in metrics
