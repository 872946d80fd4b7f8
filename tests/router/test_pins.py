"""Prefixes that shall stay: an operator's call and a client's header reach the right nodes."""

import asyncio
import hashlib
import json
from dataclasses import asdict, replace

import pytest
from aiohttp import web
from eventually import until
from router_rig import chain_of
from upstreams import NAMESPACE, SECRET

from prefixfleet.store.keep import KEEP_PATH, keep_key, open_keep
from prefixfleet.store.prefetch import SIGNATURE_HEADER
from prefixfleet.store.retention import MAX_PRIORITY

KEY = "the key of the operators"
ADMIN = {"Authorization": f"Bearer {KEY}"}
NAMED = NAMESPACE.digest(SECRET).hex()
LONG = "The prefix cache keeps what a node computed before. " * 20


@pytest.fixture
async def node(rig):
    """A node's HTTP face: the wishes that it was told."""
    wishes: asyncio.Queue = asyncio.Queue()

    async def keep(request):
        wish = open_keep(await request.read(), request.headers[SIGNATURE_HEADER], keep_key(SECRET))
        wishes.put_nowait(wish)
        return web.json_response({"covered": len(wish.chain), "kept": 0, "quota": 99})

    return await rig.node_face(KEEP_PATH, keep), wishes


@pytest.fixture
async def fleet(rig, node, tmp_path):
    """Two nodes, both with the same face; `a` holds the prompt."""
    (tmp_path / "admin-key").write_text(KEY)
    engines = [await rig.engine(name) for name in "ab"]
    await rig.start(*engines, admin_key_file=tmp_path / "admin-key")
    await rig.holds(engines[0], engines[0].tokens.of_text(LONG), http=node[0])
    await rig.holds(engines[1], [], http=node[0])
    return engines


async def pins(rig, method="POST", headers=ADMIN, **body):
    body = {"model": "tiny", "prompt": LONG} | body
    async with rig.client.request(method, "/admin/pins", headers=headers, json=body) as response:
        return response.status, await response.json()


async def test_the_holder_is_asked_to_keep_what_it_holds(rig, fleet, node):
    status, answer = await pins(rig, ttl_s=60, priority=7)
    wish = node[1].get_nowait()

    chain = chain_of(fleet[0].tokens.of_text(LONG))
    assert (status, answer["blocks"]) == (200, len(chain))
    kept = {"namespace": NAMED, "blocks": len(chain), "covered": len(chain), "quota": 99}
    assert answer["nodes"] == {"node-a": [kept]}
    assert (wish.ttl_s, wish.priority, list(wish.chain)) == (60, 7, chain)
    assert wish.namespace == NAMESPACE.digest(SECRET)
    assert node[1].empty()


async def test_what_nobody_holds_yet_is_told_to_all_and_so_is_the_end(rig, fleet, node):
    _, told = await pins(rig, prompt=LONG[::-1], ttl_s=60)
    _, ended = await pins(rig, method="DELETE")

    assert told["nodes"].keys() == ended["nodes"].keys() == {"node-a", "node-b"}
    assert [node[1].get_nowait().ttl_s for _ in range(4)] == [60, 60, 0, 0]


async def test_a_chat_is_kept_as_its_template_renders_it(rig, fleet, node):
    messages = [{"role": "system", "content": LONG}]

    await pins(rig, ttl_s=60, messages=messages, add_generation_prompt=False)
    await rig.post("/v1/chat/completions", messages=[*messages, {"role": "user", "content": "?"}])

    asked = fleet[0].seen or fleet[1].seen
    whole = fleet[0].tokens.of_chat(fleet[0].tokens.render(asked[0]["messages"])).token_ids
    kept = node[1].get_nowait().chain
    assert list(kept) == chain_of(whole)[: len(kept)]


async def test_a_node_that_cannot_be_asked_is_named_with_the_reason(rig, fleet):
    await rig.holds(fleet[0], fleet[0].tokens.of_text(LONG), http="http://127.0.0.1:1")
    await until(lambda: rig.router.feed.records["node-a"].http.endswith(":1"))

    status, answer = await pins(rig, ttl_s=60)

    assert status == 200
    [said] = answer["nodes"]["node-a"]
    assert "Connect" in said["error"]


async def test_a_node_with_two_namespaces_of_a_model_says_what_it_keeps_of_each(
    rig, node, tmp_path
):
    (tmp_path / "admin-key").write_text(KEY)
    forms = {n: replace(NAMESPACE, weights=str(n), block_tokens=n) for n in (16, 32, 1_024)}
    engines = [await rig.engine(f"e{n}", node="both", namespace=form) for n, form in forms.items()]
    records = [e.record(namespace=asdict(e.namespace)) for e in engines]
    await rig.start(records=records, admin_key_file=tmp_path / "admin-key")
    await rig.holds(engines[0], [], http=node[0])

    status, answer = await pins(rig, ttl_s=60)

    kept = {entry["namespace"]: entry for entry in answer["nodes"]["both"]}
    assert (status, kept.keys()) == (200, {f.digest(SECRET).hex() for f in forms.values()})
    entries = [kept[form.digest(SECRET).hex()] for form in forms.values()]
    assert [entry["blocks"] for entry in entries] == [answer["tokens"] // n for n in forms]
    assert [entry.get("covered", 0) for entry in entries] == [entry["blocks"] for entry in entries]
    assert "shorter than a block" in entries[-1]["error"]
    assert node[1].qsize() == 2


@pytest.mark.parametrize(
    ("body", "status"),
    [
        ({}, 400),
        ({"ttl_s": 0}, 400),
        ({"ttl_s": 1e9}, 400),
        ({"ttl_s": "60"}, 400),
        ({"ttl_s": 60, "priority": -1}, 400),
        ({"ttl_s": 60, "prompt": "short"}, 400),
        ({"ttl_s": 60, "prompt": None}, 400),
        ({"ttl_s": 60, "model": "other"}, 404),
        ({"ttl_s": 60, "key": "nobody"}, 404),
    ],
)
async def test_a_wish_that_cannot_be_meant_is_refused(rig, fleet, node, body, status):
    got, answer = await pins(rig, **body)

    assert got == status
    assert answer["error"]["message"]
    assert node[1].empty()


async def test_only_an_operator_may_call(rig, fleet, node):
    assert (await pins(rig, headers={}, ttl_s=60))[0] == 401
    assert (await pins(rig, method="DELETE", headers={}))[0] == 401
    assert node[1].empty()


async def ask(rig, keep_s, key="k", priority=None):
    wish = {"X-Prefixfleet-Keep-S": keep_s, "X-Prefixfleet-Keep-Priority": priority}
    headers = {name: value for name, value in wish.items() if value is not None}
    headers |= {"Authorization": f"Bearer {key}"}
    body = {"model": "tiny", "prompt": LONG}
    async with rig.client.post("/v1/completions", json=body, headers=headers) as response:
        return response.status, await response.json()


async def test_a_request_can_ask_that_its_own_prefix_stays(rig, fleet, node):
    assert (await ask(rig, "90"))[0] == 200
    wish = await asyncio.wait_for(node[1].get(), 30)

    assert (wish.ttl_s, list(wish.chain)) == (90, chain_of(fleet[0].tokens.of_text(LONG)))
    assert wish.priority == 0
    seen = (fleet[0].seen_headers + fleet[1].seen_headers)[-1]
    assert "X-Prefixfleet-Keep-S" not in seen


@pytest.mark.parametrize("keep_s", ["0", "-1", "1.5", "x", "9" * 12, "99999999"])
async def test_a_wish_of_no_time_is_the_clients_mistake(rig, fleet, node, keep_s):
    status, answer = await ask(rig, keep_s)

    assert (status, answer["error"]["type"]) == (400, "invalid_request_error")
    assert node[1].empty()


@pytest.mark.parametrize("priority", ["0", "7", str(MAX_PRIORITY)])
async def test_a_request_can_say_how_much_its_wish_matters(rig, fleet, node, priority):
    assert (await ask(rig, "90", priority=priority))[0] == 200

    wish = await asyncio.wait_for(node[1].get(), 30)
    assert (wish.ttl_s, wish.priority) == (90, int(priority))
    seen = (fleet[0].seen_headers + fleet[1].seen_headers)[-1]
    assert "X-Prefixfleet-Keep-Priority" not in seen


@pytest.mark.parametrize(
    ("keep_s", "priority"),
    [("90", "-1"), ("90", "101"), ("90", "x"), ("90", ""), ("90", "9" * 12), ("90", "1.5"),
     (None, "5")],
)  # fmt: skip
async def test_a_priority_that_cannot_be_is_the_clients_mistake(rig, fleet, node, keep_s, priority):
    status, answer = await ask(rig, keep_s, priority=priority)

    assert (status, answer["error"]["type"]) == (400, "invalid_request_error")
    assert "keep-priority" in answer["error"]["message"]
    assert node[1].empty()


async def test_a_key_keeps_only_if_it_may_and_only_its_own(rig, node, tmp_path):
    def entry(name, **fields):
        return {"name": name, "sha256": hashlib.sha256(name.encode()).hexdigest()} | fields

    (tmp_path / "admin-key").write_text(KEY)
    keys = [entry("no", tenant="t"), entry("yes", tenant="t", may_keep=True)]
    (tmp_path / "keys.json").write_text(json.dumps({"keys": keys}))
    engine = await rig.engine()
    await rig.start(engine, admin_key_file=tmp_path / "admin-key", keys_file=tmp_path / "keys.json")
    await rig.holds(engine, [], http=node[0])

    assert (await ask(rig, "90", key="no"))[0] == 403
    assert (await ask(rig, "90", key="yes"))[0] == 200
    own = (await asyncio.wait_for(node[1].get(), 30)).chain
    await pins(rig, ttl_s=60, key="yes")
    await pins(rig, ttl_s=60)

    assert node[1].get_nowait().chain == own
    assert node[1].get_nowait().chain != own
