"""What a tenant can see of another one: neither by a hit, nor by a pull, nor by the time of an
answer; and what a client may not tell an engine behind the router's back."""

import hashlib
import json

import pytest
from upstreams import READERS, UNPLANNED

from prefixfleet.router.routes import ROUTES

LONG = "The prefix cache keeps what a node computed before. " * 20

BODIES = {
    "/v1/completions": {"prompt": "hello"},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "hello"}]},
    "/v1/responses": {"input": "hello"},
    "/v1/messages": {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 5},
}
POOLED = {  # their engine caches the prefixes of causal models too
    "/v1/embeddings": {"input": "hello"},
    "/v1/score": {"text_1": "hello", "text_2": "world"},
    "/v1/rerank": {"query": "hello", "documents": ["world"]},
}
COMPUTE_NOTHING = {"/tokenize", "/detokenize", "/v1/messages/count_tokens"}
SMUGGLED = [
    b'"kv_transfer_params":{"do_remote_prefill":true,"remote_host":"10.0.0.1"}',
    b'"kv\\u005ftransfer_params":{"remote_kv_source":{"remote_host":"10.0.0.1"}}',
    b'"kv_transfer_params":null,"kv_transfer_params":{"remote_host":"10.0.0.1"}',
]


@pytest.fixture
def keys_file(tmp_path):
    path = tmp_path / "keys.json"
    keys = [
        {"name": n, "tenant": n, "sha256": hashlib.sha256(f"key-{n}".encode()).hexdigest()}
        for n in ("one", "two")
    ]
    path.write_text(json.dumps({"keys": keys}))
    return path


async def ask(rig, tenant, prompt, **fields):
    asked = {"model": "tiny", "prompt": prompt} | fields
    headers = {"Authorization": f"Bearer key-{tenant}"}
    async with rig.client.post("/v1/completions", json=asked, headers=headers) as response:
        await response.read()
        assert response.status == 200
        return {n.lower(): v for n, v in response.headers.items()}


async def fleet_with_a_secret_prompt(rig, keys_file):
    """Two engines; the second's node holds what tenant "one" asked."""
    engines = [await rig.engine(name) for name in "ab"]
    router = await rig.start(*engines, keys_file=keys_file)
    ids = engines[1].tokens.of_text(LONG)
    salt = router.salt_of(router.files.keys.check("Bearer key-one"), "")
    await rig.holds(engines[0], [])
    await rig.holds(engines[1], ids, salt=salt)
    assert int((await ask(rig, "one", LONG))["x-prefixfleet-hit-tokens"]) > 0
    for engine in engines:
        engine.seen.clear()
    return engines, salt


async def test_another_tenants_prompt_is_treated_like_one_that_nobody_asked(rig, keys_file):
    """The estimate, the plan and the pull are those of an unseen prompt: time tells nothing."""
    engines, _ = await fleet_with_a_secret_prompt(rig, keys_file)
    ids = engines[0].tokens.of_text(LONG)
    unseen = [7 + number % 200 for number in range(len(ids))]

    guessed, fresh = await ask(rig, "two", ids), await ask(rig, "two", unseen)

    for name in ("hit-tokens", "pulled-tokens", "estimate-ms"):
        assert guessed[f"x-prefixfleet-{name}"] == fresh[f"x-prefixfleet-{name}"]
    plans = [asked["kv_transfer_params"]["prefixfleet"] for e in engines for asked in e.seen]
    assert [(plan["source"], plan["blocks"]) for plan in plans] == [("", 0), ("", 0)]


async def test_a_salt_that_is_known_opens_nothing(rig, keys_file):
    engines, salt = await fleet_with_a_secret_prompt(rig, keys_file)

    headers = await ask(rig, "two", LONG, cache_salt=salt)

    assert headers["x-prefixfleet-hit-tokens"] == "0"
    assert all(asked["cache_salt"] != salt for engine in engines for asked in engine.seen)


async def test_the_engine_gets_a_salt_of_the_tenant_on_every_route_with_a_prompt(rig, keys_file):
    """Else the engine's own cache, and its time, would tell."""
    engine = await rig.engine()
    await rig.start(engine, keys_file=keys_file)

    assert BODIES.keys() | POOLED.keys() == {r.path for r in ROUTES} - COMPUTE_NOTHING
    own = await salts_of(rig, engine, {})
    assert {len(found) for found in own.values()} == {1}
    assert own["one"].isdisjoint(own["two"])
    assert None not in own["one"] | own["two"]

    (stolen,) = own["one"]
    asked = await salts_of(rig, engine, {"cache_salt": stolen})
    assert {len(found) for found in asked.values()} == {1}
    assert stolen not in asked["one"] | asked["two"]


async def salts_of(rig, engine, fields):
    """What the engine gets of each tenant, over all routes."""
    salts = {}
    for tenant in ("one", "two"):
        for path, body in {**BODIES, **POOLED}.items():
            headers = {"Authorization": f"Bearer key-{tenant}"}
            asked = {"model": "tiny"} | body | fields
            async with rig.client.post(path, json=asked, headers=headers) as response:
                assert response.status == 200
            salts.setdefault(tenant, set()).add(json.loads(engine.raw[-1]).get("cache_salt"))
    return salts


@pytest.mark.parametrize("smuggled", SMUGGLED)
@pytest.mark.parametrize("path", BODIES)
@pytest.mark.parametrize("plain", [False, True], ids=["connector", "plain"])
async def test_a_client_cannot_make_an_engine_fetch_from_elsewhere(
    rig, tmp_path, path, smuggled, plain
):
    from static_entries import entry, write

    engine = await rig.engine(plain=plain)
    if plain:
        await rig.start(records=[], ready=1, workers_file=write(tmp_path / "w.json", entry(engine)))
    else:
        await rig.start(engine)
    body = json.dumps({"model": "tiny"} | BODIES[path]).encode()

    async with rig.client.post(path, data=body[:-1] + b"," + smuggled + b"}") as response:
        assert response.status == 200

    (asked,) = engine.seen
    assert b"10.0.0.1" not in engine.raw[0]
    assert set(asked.get("kv_transfer_params") or ()) <= {"prefixfleet"}


@pytest.mark.parametrize("path", [*READERS, *UNPLANNED])
async def test_headers_of_our_name_do_not_pass_in_either_direction(rig, path):
    engine = await rig.engine()
    await rig.start(engine)
    forged = {
        "X-Prefixfleet-Node": "forged",
        "x-prefixfleet-source": "10.0.0.1",
        "X-PREFIXFLEET-anything": "forged",
    }

    body = {"model": "tiny"} | BODIES.get(path, {"input": "hello"})
    async with rig.client.post(path, json=body, headers=forged) as response:
        answered = str(response.headers)

    assert "forged" not in answered
    assert "10.0.0.1" not in answered
    seen = [name.lower() for headers in engine.seen_headers for name in headers]
    assert not [name for name in seen if name.startswith("x-prefixfleet-")]
