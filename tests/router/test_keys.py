"""API keys: who may ask, whose cache they reuse, how much they may ask for."""

import asyncio
import contextlib
import hashlib
import json
import os

import pytest
from chats import tokenizer
from clocks import ManualClock
from eventually import until
from router_rig import chain_of
from upstreams import EVENTS, SECRET, for_ever, streaming

from prefixfleet.router.errors import BadRequest, TooBusy, Unauthorized
from prefixfleet.router.headers import deadline_of, keep_of
from prefixfleet.router.keys import ANYBODY, Key, Keys, tenant_salt
from prefixfleet.router.known_prefixes import KnownPrefixes
from prefixfleet.router.limits import BURST_S, Limits
from prefixfleet.router.shares import Shares
from prefixfleet.router.waiting import Waiting, most_urgent
from prefixfleet.store.errors import ConfigError

LONG = "The prefix cache keeps what a node computed before. " * 20


def digest(key: str) -> str:
    return hashlib.sha256(key.encode()).hexdigest()


def entry(name, **fields):
    return {"name": name, "sha256": digest(f"key-{name}"), "tenant": name} | fields


def write(path, *entries):
    path.write_text(json.dumps({"keys": list(entries)}))
    return path


@pytest.fixture
def path(tmp_path):
    return write(tmp_path / "keys.json", entry("a"), entry("b"), entry("open", shared_cache=True))


async def ask(rig, name, path="/v1/completions", header="Authorization", **body):
    value = f"Bearer key-{name}" if header == "Authorization" else f"key-{name}"
    asked = {"model": "tiny", "prompt": LONG} | body
    async with rig.client.post(path, json=asked, headers={header: value}) as response:
        await response.read()
        return response


def test_a_key_is_known_by_its_digest(path):
    keys = Keys(path)
    keys.load()

    assert keys.check("Bearer key-a").tenant == "a"
    assert keys.check("bearer  key-b ").tenant == "b"
    assert "key-a" not in path.read_text()


@pytest.mark.parametrize(
    "header", [None, "", "Bearer", "Bearer ", "Bearer x", "key-a", "Basic key-a", "Bearer \udcff"]
)
def test_any_other_header_is_refused(path, header):
    keys = Keys(path)
    keys.load()

    with pytest.raises(Unauthorized):
        keys.check(header)


def test_without_a_file_everybody_may_ask():
    assert Keys(None).check(None) is ANYBODY


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        '{"keys": [{}]}',
        '{"keys": [{"name": "a", "sha256": "x", "tenant": "t"}]}',
        json.dumps({"keys": [entry("a", unknown=1)]}),
        json.dumps({"keys": [entry("a", max_in_flight=0)]}),
        json.dumps({"keys": [entry("a", tokens_per_s=-1)]}),
        json.dumps({"keys": [entry("a", tier="A B")]}),
        json.dumps({"keys": [entry("a"), entry("a")]}),
    ],
)
def test_a_wrong_file_stops_the_start_and_is_named(tmp_path, text):
    path = tmp_path / "keys.json"
    path.write_text(text)

    with pytest.raises(ConfigError, match="PREFIXFLEET_ROUTER_KEYS_FILE"):
        Keys(path).load()


def test_a_changed_file_is_read_again_and_a_wrong_one_leaves_the_old_keys(path):
    keys = Keys(path)
    keys.load()
    keys.reload_if_changed()

    write(path, entry("c"))
    os.utime(path, ns=(1, 1))
    keys.reload_if_changed()
    assert keys.check("Bearer key-c").name == "c"
    with pytest.raises(Unauthorized):
        keys.check("Bearer key-a")

    path.write_text("{")
    os.utime(path, ns=(2, 2))
    with pytest.raises(ConfigError):
        keys.reload_if_changed()
    assert keys.check("Bearer key-c").name == "c"


def test_salts_of_tenants_differ_and_cannot_be_asked_for():
    a, b = (Key(name=n, sha256="0" * 64, tenant=n) for n in "ab")

    salts = {
        tenant_salt(a, "", SECRET),
        tenant_salt(b, "", SECRET),
        tenant_salt(a, "x", SECRET),
        tenant_salt(b, tenant_salt(a, "", SECRET), SECRET),
        tenant_salt(a, "", b"another secret of many bytes"),
    }

    assert len(salts) == 5
    assert tenant_salt(ANYBODY, "x", SECRET) == "x"


async def test_without_a_key_the_answer_is_401(rig, path):
    engine = await rig.engine()
    await rig.start(engine, keys_file=path)

    for name in ("nobody", "A"):
        assert (await ask(rig, name)).status == 401
    assert (await ask(rig, "a")).status == 200
    assert (await ask(rig, "a", header="X-Api-Key")).status == 200
    assert len(engine.seen) == 2


async def test_the_engine_does_not_see_the_routers_keys(rig, path):
    engine = await rig.engine()
    await rig.start(engine, keys_file=path)

    await ask(rig, "a")
    await ask(rig, "a", header="X-Api-Key")

    for headers in engine.seen_headers:
        assert not {"authorization", "x-api-key"} & {name.lower() for name in headers}


async def test_a_tenants_cache_is_its_own_and_the_engine_is_told(rig, path):
    engines = [await rig.engine(name) for name in "ab"]
    router = await rig.start(*engines, keys_file=path)
    ids = engines[1].tokens.of_text(LONG)
    key = router.files.keys.check("Bearer key-a")
    await rig.holds(engines[0], [])
    await rig.holds(engines[1], ids, salt=router.salt_of(key, ""))

    own = await ask(rig, "a")
    others = await ask(rig, "b", cache_salt=router.salt_of(key, ""))
    shared = await ask(rig, "open", cache_salt="mine")

    hits = [int(r.headers["x-prefixfleet-hit-tokens"]) for r in (own, others, shared)]
    assert hits[0] > 0
    assert hits[1:] == [0, 0]
    salts = [asked.get("cache_salt") for engine in engines for asked in engine.seen]
    assert router.salt_of(key, "") in salts
    assert "mine" in salts
    assert len(set(salts)) == 3
    assert chain_of(ids, "x") != chain_of(ids)


def test_the_time_of_tokenising_does_not_tell_what_other_tenants_asked(monkeypatch):
    monkeypatch.setattr("prefixfleet.router.known_prefixes.MIN_CHARACTERS", 0)
    made = tokenizer()
    known = KnownPrefixes(made.get_added_tokens_decoder())
    encoded = []

    def encode(text):
        encoded.append(text)
        return made.encode(text, add_special_tokens=False).ids

    text = "<|im_start|>a secret question<|im_end|>"
    for owner in ("a", "b", "a"):
        known.encode(text, encode, owner)

    assert encoded == [text, text]


async def test_requests_in_flight_of_a_key_are_limited(rig, path):
    write(path, entry("a", max_in_flight=1), entry("b"))
    engine = await rig.engine(behave=streaming(EVENTS[0], then=for_ever))
    await rig.start(engine, keys_file=path)
    first = asyncio.create_task(ask(rig, "a", stream=True))
    await until(lambda: len(engine.seen) == 1)

    second = await ask(rig, "a")
    engine.behave = None

    assert second.status == 429
    assert "Retry-After" in second.headers
    assert (await ask(rig, "b")).status == 200
    first.cancel()
    await asyncio.gather(first, return_exceptions=True)

    async def admitted():
        return (await ask(rig, "a")).status == 200

    await until(admitted)


async def test_a_changed_key_file_holds_without_a_restart(rig, path):
    await rig.start(await rig.engine(), keys_file=path)
    assert (await ask(rig, "c")).status == 401

    write(path, entry("c"))

    async def admitted():
        return (await ask(rig, "c")).status == 200

    await until(admitted)
    assert (await ask(rig, "a")).status == 401


async def test_a_broken_key_file_is_a_degraded_mode(rig, path):
    router = await rig.start(await rig.engine(), keys_file=path)

    path.write_text("{")

    await until(lambda: [mode.name for mode in router.degraded.modes()] == ["keys"])
    assert (await ask(rig, "a")).status == 200
    write(path, entry("a"))
    await until(lambda: router.degraded.modes() == [])


@contextlib.contextmanager
def admitted(limits, key):
    """One request in flight."""
    limits.admit(key)
    try:
        yield
    finally:
        limits.leave(key)


@pytest.mark.parametrize("fields", [{"requests_per_s": 2.0}, {"tokens_per_s": 2.0}])
def test_rates_are_limited_and_recover(fields):
    clock = ManualClock()
    limits = Limits(clock)
    key = Key(name="a", sha256="0" * 64, tenant="a", **fields)

    def ask_once():
        with admitted(limits, key):
            limits.charge_tokens(key, 1)

    for _ in range(int(2.0 * BURST_S)):
        ask_once()
    with pytest.raises(TooBusy) as refused:
        ask_once()
    assert 0 < refused.value.retry_after_s <= 0.5

    clock.advance(refused.value.retry_after_s)
    ask_once()


def test_a_prompt_longer_than_the_bucket_is_served_and_paid_for_later():
    clock = ManualClock()
    limits = Limits(clock)
    key = Key(name="a", sha256="0" * 64, tenant="a", tokens_per_s=100.0)

    with admitted(limits, key):
        limits.charge_tokens(key, 1_200)
    clock.advance(9.0)
    with pytest.raises(TooBusy), admitted(limits, key):
        pass

    clock.advance(1.1)
    with admitted(limits, key):
        pass


def test_accounts_of_unlimited_keys_do_not_pile_up():
    limits = Limits(ManualClock())
    for i in range(100):
        with admitted(limits, Key(name=str(i), sha256="0" * 64, tenant="a")):
            pass

    assert limits._accounts == {}


def served(counts, tokens, rounds):
    """Who goes in ``rounds`` turns, if everybody always has requests waiting."""
    shares = Shares()
    for tenant in counts:
        shares.arrives(tenant)
    went = []
    for _ in range(rounds):
        queue = [Waiting(0.0, tokens[t], 1.0, tenant=t) for t in counts]
        first = most_urgent(queue, 1.0, shares)[0]
        shares.goes(first.tenant, first.prompt_tokens, counts[first.tenant])
        went.append(first.tenant)
    return went


def test_tenants_get_tokens_by_weight_whatever_their_prompts_are():
    tokens = {"short": 10, "long": 1_000, "heavy": 100}
    went = served({"short": 1.0, "long": 1.0, "heavy": 2.0}, tokens, 20_000)

    got = {tenant: went.count(tenant) * tokens[tenant] for tenant in tokens}
    assert got["long"] == pytest.approx(got["short"], rel=0.02)
    assert got["heavy"] == pytest.approx(2 * got["short"], rel=0.02)


def test_a_pause_is_no_credit():
    shares = Shares()
    shares.arrives("busy")
    for _ in range(100):
        shares.goes("busy", 10, 1.0)
    shares.arrives("late")

    lead = shares.time_of("busy") - shares.time_of("late")

    assert lead <= 10


def test_a_higher_priority_goes_first_whatever_was_served():
    shares = Shares()
    shares.goes("vip", 1_000_000, 1.0)
    low = Waiting(0.0, 10, 1.0, tenant="poor")
    high = Waiting(9.0, 10, 1.0, tenant="vip", priority=1)

    assert most_urgent([low, high], 10.0, shares) == [high, low]


BAD_NUMBERS = [
    "", "0", "-1", "1.5", "x", "\u0661", "9" * 30, "9" * 4_301, "0000000001" + "9" * 400, "1" * 11,
]  # fmt: skip


@pytest.mark.parametrize("name", ["x-prefixfleet-ttft-deadline-ms", "x-prefixfleet-keep-s"])
@pytest.mark.parametrize("value", BAD_NUMBERS)
def test_a_header_that_is_no_such_number_is_refused(name, value):
    with pytest.raises(BadRequest, match=name) as refused:
        (deadline_of if "deadline" in name else keep_of)({name: value})
    assert len(str(refused.value)) < 150


def test_headers_of_numbers_are_read():
    assert deadline_of({"x-prefixfleet-ttft-deadline-ms": "0000000250"}) == 0.25
    assert keep_of({"x-prefixfleet-keep-s": "60"}) == (60, 0)


@pytest.mark.parametrize("value", ["", "9" * 4_301])
async def test_a_deadline_that_is_no_number_is_the_clients_mistake(rig, value):
    await rig.start(await rig.engine())

    headers = {"x-prefixfleet-ttft-deadline-ms": value}
    body = {"model": "tiny", "prompt": "x"}
    async with rig.client.post("/v1/completions", json=body, headers=headers) as response:
        assert response.status == 400


async def test_an_engine_that_is_silent_at_the_clients_deadline_is_given_up(rig):
    async def silent(engine, request, asked):
        await for_ever()

    engine = await rig.engine(behave=silent)
    router = await rig.start(engine)

    headers = {"x-prefixfleet-ttft-deadline-ms": "1000"}
    body = {"model": "tiny", "prompt": "x"}
    async with rig.client.post("/v1/completions", json=body, headers=headers) as response:
        assert response.status == 504
        assert (await response.json())["error"]["code"] == "deadline_exceeded"

    async with asyncio.timeout(60):
        await engine.cancelled.wait()
    assert not router.traffic.is_ejected("a")
    assert router.book.load("a").queued_requests == 0


async def test_a_clients_deadline_is_honoured(rig):
    engine = await rig.engine(prefill_tokens_per_s=100.0)
    await rig.start(engine)
    body = {"model": "tiny", "prompt": list(range(500))}

    statuses = []
    for milliseconds in (1_000, 60_000):
        headers = {"X-Prefixfleet-Ttft-Deadline-Ms": str(milliseconds)}
        async with rig.client.post("/v1/completions", json=body, headers=headers) as response:
            statuses.append(response.status)

    assert statuses == [429, 200]
    assert "x-prefixfleet-ttft-deadline-ms" not in {n.lower() for n in engine.seen_headers[0]}
