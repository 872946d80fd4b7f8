"""Stored responses that are not found: never made, another tenant's, of a worker that is gone."""

import pytest
from eventually import until
from stored_responses import ask, count, create, error, fleet, path_of, replica
from upstreams import storing, streaming
from yarl import URL

from prefixfleet.router.stored import PREVIOUS

ODD = ["a b", "a/b", "..", "Straße世界", "%2F", "a?b#c", '"\\', "{x}", "x" * 256]


async def test_what_nobody_made_is_not_found(rig):
    engines = await fleet(rig)

    for method, path in (("GET", "resp_1"), ("POST", "resp_1/cancel"), ("GET", "x" * 5_000)):
        status, _, raw = await ask(rig, f"/v1/responses/{path}", method)
        told = error(raw)
        assert (status, told["type"]) == (404, "invalid_request_error")
        assert told["code"] == "response_not_found"
        assert told["message"].endswith(" not found.")
    status, _, told = await create(rig, previous_response_id="resp_1")

    assert status == 404
    assert told["error"] == {
        "message": "Response with id 'resp_1' not found.",
        "type": "invalid_request_error",
        "param": PREVIOUS,
        "code": "previous_response_not_found",
    }
    assert not any(engine.paths for engine in engines.values())
    assert count(rig, "previous", "unknown") == 1


async def test_another_tenants_is_like_one_that_never_was(rig, tenants_file):
    """Read, cancelled or gone on from; by either router."""
    engines = await fleet(rig, keys_file=tenants_file)
    other = await replica(rig, engines, keys_file=tenants_file)
    _, _, mine = await create(rig, "one")
    assert (await ask(other, path_of(mine["id"]), tenant="one"))[0] == 200
    seen = [list(engine.paths) for engine in engines.values()]

    for router in (rig, other):
        for method, end in (("GET", ""), ("HEAD", ""), ("POST", "/cancel")):
            theirs = await ask(router, path_of(mine["id"]) + end, method, "two")
            nobodys = await ask(router, path_of("resp_zz") + end, method, "two")
            assert theirs[0] == nobodys[0] == 404
            assert theirs[2].replace(mine["id"].encode(), b"resp_zz") == nobodys[2]
            assert theirs[1].keys() == nobodys[1].keys()
        status, _, told = await create(router, "two", previous_response_id=mine["id"])
        assert (status, told["error"]["code"]) == (404, "previous_response_not_found")
    assert [list(engine.paths) for engine in engines.values()] == seen


async def test_a_tenant_cannot_take_the_id_of_another_ones(rig, tenants_file):
    """vLLM lets a request name its response; the name would be all that tells whose it is."""
    engines = await fleet(rig, keys_file=tenants_file)
    _, _, mine = await create(rig, "one")

    status, _, told = await create(rig, "two", request_id=mine["id"], store=False)

    assert (status, told["error"]["param"]) == (400, "request_id")
    assert (await ask(rig, path_of(mine["id"]), tenant="two"))[0] == 404
    assert sum(len(engine.seen) for engine in engines.values()) == 1


async def test_without_keys_a_request_may_name_its_response(rig):
    await fleet(rig)

    status, _, _ = await create(rig, request_id="resp_mine", metadata={"id": "resp_mine"})

    assert status == 200
    assert (await ask(rig, path_of("resp_mine")))[0] == 200


@pytest.mark.parametrize("response", ODD)
async def test_odd_ids(rig, response):
    engines = await fleet(rig)
    other = await replica(rig, engines)
    _, _, made = await create(rig, metadata={"id": response})
    assert made["id"] == response

    for router in (rig, other):
        status, headers, _ = await ask(router, _raw(router, path_of(response)))
        assert headers["x-prefixfleet-node"] == f"node-{made['served_by']}"
        assert status == 200
        status, _, second = await create(router, previous_response_id=response)
        assert (status, second["served_by"]) == (200, made["served_by"])


def _raw(rig, path):
    """A URL that the client leaves as it is."""
    return URL(f"http://127.0.0.1:{rig.runner.addresses[0][1]}{path}", encoded=True)


async def test_one_that_is_too_long_is_not_kept(rig):
    await fleet(rig)

    await create(rig, metadata={"id": "x" * 257})

    assert (await ask(rig, path_of("x" * 257)))[0] == 404
    assert rig.router.metrics.unread_response_ids._value.get() == 1


@pytest.mark.parametrize(
    "lie",
    [
        b"",
        b"no JSON",
        b'{"output":[{"id":"resp_1"}],"id":"resp_2"}',
        b'{"id":7,"x":"\\"id\\":\\"resp_1\\""}',
        b'data: {"delta":"resp_1"}\n\ndata: {"response":{"id":"resp_1"}}\n\n',
    ],
)
async def test_a_body_that_lies_passes_and_is_not_believed(rig, lie):
    engines = await fleet(rig)
    for engine in engines.values():
        engine.stored["resp_1"] = engine.name
        engine.behave = streaming(*filter(None, [lie]))

    status, _, raw = await ask(rig, "/v1/responses", "POST", json={"model": "tiny"})

    assert (status, raw) == (200, lie)
    assert (await ask(rig, path_of("resp_1")))[0] == 404
    assert rig.router.metrics.unread_response_ids._value.get() == 1


async def test_what_shall_not_be_stored_or_failed_is_not_noted(rig):
    engines = await fleet(rig)
    await create(rig, store=False)
    await create(rig, **{PREVIOUS: 7})

    assert len(rig.router.keepers) == 0
    assert engines.keys() == {"a", "b"}
    await create(rig, store=None)
    assert len(rig.router.keepers) == 1


async def test_a_worker_that_is_gone_says_so(rig):
    engines = await fleet(rig)
    _, _, made = await create(rig)
    keeper = made["served_by"]
    await rig.registry.withdraw(keeper)
    await until(lambda: keeper not in rig.router.roster.names())

    status, _, raw = await ask(rig, path_of(made["id"]))
    assert (status, error(raw)["code"]) == (404, "response_not_found")
    assert f"worker {keeper}, which kept it, is gone" in error(raw)["message"]
    status, _, told = await create(rig, previous_response_id=made["id"])

    assert (status, told["error"]["code"]) == (404, "previous_response_not_found")
    assert f"worker {keeper}, which kept it, is gone" in told["error"]["message"]
    assert count(rig, "retrieve", "gone") == count(rig, "previous", "gone") == 1
    await rig.announce(engines[keeper].record())
    await rig.until_ready(2)
    engines[keeper].stored.clear()  # as one that was started again
    status, _, raw = await ask(rig, path_of(made["id"]))
    assert (status, error(raw)["param"]) == (404, "response_id")


async def test_a_worker_that_dies_is_told_of_and_nobody_else_is_asked(rig):
    engines = await fleet(rig)
    _, _, made = await create(rig)
    keeper = made["served_by"]
    await engines[keeper].stop()

    status, headers, told = await create(rig, previous_response_id=made["id"])
    assert (status, told["error"]["code"]) == (503, "response_unavailable")
    assert f"worker {keeper}, which alone keeps the response" in told["error"]["message"]
    assert headers["Retry-After"] == "1"
    status, headers, raw = await ask(rig, path_of(made["id"]))

    assert (status, error(raw)["code"]) == (503, "response_unavailable")
    assert f"kept by worker {keeper}, which is down" in error(raw)["message"]
    assert "Retry-After" in headers
    (alive,) = engines.keys() - {keeper}
    assert engines[alive].seen == []


async def test_a_reader_finds_out_that_a_worker_died(rig):
    engines = await fleet(rig)
    _, _, made = await create(rig)
    keeper = made["served_by"]
    await engines[keeper].stop()

    status, _, raw = await ask(rig, path_of(made["id"]))

    assert (status, error(raw)["code"]) == (503, "response_unavailable")
    assert rig.router.roster.seated(keeper)[0] == "down"


async def test_a_drained_worker_is_read_and_gets_nothing_new(rig, tmp_path):
    """What it began in the background ends there; what goes on from it may wait for `resume`."""
    (tmp_path / "admin").write_text("an admin key that nobody guesses")
    await fleet(rig, admin_key_file=tmp_path / "admin")
    _, _, made = await create(rig)
    keeper = made["served_by"]
    admin = {"Authorization": "Bearer an admin key that nobody guesses"}
    await ask(rig, f"/admin/workers/{keeper}/drain", "POST", headers=admin)

    status, headers, told = await create(rig, previous_response_id=made["id"])
    assert (status, told["error"]["param"]) == (503, PREVIOUS)
    assert f"kept by worker {keeper}, which is draining" in told["error"]["message"]
    assert int(headers["Retry-After"]) >= 1
    assert (await ask(rig, path_of(made["id"])))[0] == 200
    assert (await ask(rig, path_of(made["id"]) + "/cancel", "POST"))[0] == 200
    await ask(rig, f"/admin/workers/{keeper}/resume", "POST", headers=admin)

    assert (await create(rig, previous_response_id=made["id"]))[0] == 200


async def test_of_another_model(rig):
    big = await rig.engine("b", model="big", behave=storing)
    small = await rig.engine("a", behave=storing)
    await rig.start(records=[small.record(), big.record(model="big")])
    _, _, made = await create(rig, model="big")

    status, _, told = await create(rig, previous_response_id=made["id"])

    assert (status, told["error"]["code"]) == (404, "previous_response_not_found")
    assert "it is of 'big'" in told["error"]["message"]


async def test_of_an_adapter(rig):
    """Its engine goes on with it, as that adapter; not as one that it lacks."""
    engine = await rig.engine("a", behave=storing, adapters={"sql": "0a" * 16})
    await rig.start(engine)
    _, _, made = await create(rig, model="sql")

    status, _, _ = await create(rig, model="sql", previous_response_id=made["id"])
    other, _, told = await create(rig, model="law", previous_response_id=made["id"])

    assert (status, engine.seen[-1]["model"]) == (200, "sql")
    assert (other, told["error"]["code"]) == (404, "previous_response_not_found")
