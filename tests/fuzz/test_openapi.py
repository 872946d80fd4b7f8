"""The router does what its own OpenAPI document says, whatever schemathesis makes of it."""

import asyncio
import os
import threading
from contextlib import AsyncExitStack, contextmanager

import pytest
import requests
import schemathesis
from chats import write_model
from hypothesis import HealthCheck, given, settings
from router_rig import Rig

from prefixfleet.router.openapi import document

EXAMPLES = int(os.environ.get("FUZZ_EXAMPLES", "48")) // 4
FEW = settings(
    max_examples=EXAMPLES,
    suppress_health_check=list(HealthCheck),
    database=None,
)
LIMIT_S = 30.0
SCHEMA = schemathesis.openapi.from_dict(document())
OPERATIONS = [(path, method) for path, methods in document()["paths"].items() for method in methods]


@contextmanager
def loop_in_a_thread():
    """Runs coroutines of a plain function."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    try:
        yield lambda work: asyncio.run_coroutine_threadsafe(work, loop).result(60)
    finally:
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()


@pytest.fixture(scope="module")
def live(tmp_path_factory, redis_server):
    """(base URL, paths and methods) of a router with one engine and an admin key."""
    folder = write_model(tmp_path_factory.mktemp("openapi-model"))
    key = folder / "admin-key"
    key.write_text("an admin key that nobody guesses")
    with loop_in_a_thread() as run:
        stack = AsyncExitStack()

        async def start():
            rig = Rig(folder, stack, redis_server.url)
            engine = await rig.engine()
            await rig.start(engine, admin_key_file=key)
            await rig.announce(engine.record(), ttl_s=3600.0)  # a machine may be slow
            routes = rig.runner.app.router.routes()
            found = {(r.resource.canonical, r.method.lower()) for r in routes}
            return f"http://127.0.0.1:{rig.runner.addresses[0][1]}", found

        yield run(start())
        run(stack.aclose())


def test_the_document_names_every_route_of_the_api(live):
    _, served = live
    api = {(p, m) for p, m in served if m not in ("head", "options") and "dashboard" not in p}

    assert api == set(OPERATIONS)


def test_the_document_is_served(live):
    assert requests.get(f"{live[0]}/openapi.json", timeout=LIMIT_S).json() == document()


@pytest.mark.parametrize(("path", "method"), OPERATIONS)
def test_answers_are_as_the_document_says(live, path, method):
    @FEW
    @given(case=SCHEMA[path][method.upper()].as_strategy())
    def check(case):
        case.validate_response(case.call(base_url=live[0], timeout=LIMIT_S))

    check()
