"""What ``prefixfleet status`` says of a fleet, and of a wrong address."""

import io
import re
import threading
from dataclasses import asdict
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
import redis.asyncio
from rich.console import Console

from prefixfleet.cluster import status
from prefixfleet.cluster.run_state import RunDir
from prefixfleet.cluster.status import read_status, show_status
from prefixfleet.store.errors import ConfigError
from prefixfleet.store.records import FleetWish

NOTHING = b'{"nodes": [], "workers": [], "degraded": [], "hit_rate": {}}'


@pytest.fixture
def served():
    """Serves one body at every path; its address."""
    servers = []

    def serve(body, status=200):
        class Answer(BaseHTTPRequestHandler):
            def do_GET(self):
                self.send_response(status)
                self.send_header("Content-Type", "application/json")
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, *_):
                pass

        server = ThreadingHTTPServer(("127.0.0.1", 0), Answer)
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        servers.append((server, thread))
        return f"http://127.0.0.1:{server.server_port}"

    yield serve
    for server, thread in servers:
        server.shutdown()
        thread.join()
        server.server_close()


@pytest.mark.parametrize("end", ["", "/", "/v1"])
async def test_any_fleet_is_shown_by_its_routers_address(served, tmp_path, end):
    url = served(NOTHING)

    found = await read_status(RunDir(tmp_path), url + end)

    assert (found["endpoint"], found["workers"]) == (url, [])


NODE = b'{"nodes": [{"node": "a"}], "workers": [], "degraded": [], "hit_rate": {}}'


@pytest.mark.parametrize(
    ("body", "status"),
    [(b"{}", 200), (b"[]", 200), (NODE, 200), (NOTHING, 404), (b"[]", 404), (b"no", 200)],
)
async def test_an_address_without_a_router_is_an_error(served, tmp_path, body, status):
    with pytest.raises(ConfigError, match=r"expected a router's status|does not answer"):
        await read_status(RunDir(tmp_path), served(body, status))


def shown(wish, nodes=()):
    console = Console(file=io.StringIO(), width=200)
    status = {"fleet": "f", "phase": "ready", "endpoint": "e", "nodes": nodes, "workers": []}
    show_status({**status, "degraded": [], "hit_rate": {}, "wish": asdict(wish)}, console)
    return console.file.getvalue()


def test_what_is_wished_is_shown():
    wish = FleetWish(
        draining=("a", "b"), nodes=3, rollout=2, environ={"X": "[1]"}, failed="replace: no [room]"
    )

    text = shown(wish)

    assert "draining: a, b" in text
    assert "scaled to 3 nodes" in text
    assert "update 2: X=[1]" in text
    assert "the last wish failed: replace: no [room]" in text
    assert "scaled" not in shown(FleetWish())


def test_namespaces_that_share_a_nodes_memory_are_shown():
    kinds = {
        "aa" * 16: {"engines": ["x"], "slots": 100, "bytes": 1 << 30, "waste_bytes": 1 << 29},
        "bb" * 16: {
            "engines": 7,
            "slots": "many",
            "ends": True,
            "found_blocks": 12,
            "disk": True,
            "disk_bytes": 3 << 29,
        },
        "cc" * 16: None,
    }
    node = {"node": "n", "epoch": 1, "lease": "held", "stats": {"kinds": kinds}}

    text = shown(FleetWish(), nodes=[node])

    assert re.search(r"aaaaaaaa .* x .* 100 .* 1.00 .* 50.0% .* no", text)
    assert re.search(r"bbbbbbbb .* none, ends .* 12 .* 1.50", text)
    assert "cccccccc" not in text


async def test_a_wish_that_nobody_with_the_secret_wrote_is_said(redis_url, fleet, tmp_path):
    directory = RunDir(tmp_path / fleet)
    directory.create()
    key = f"pf1:{{{fleet}}}:wish"
    async with redis.asyncio.Redis.from_url(redis_url) as raw:
        await raw.hset(key, mapping={"generation": 1, "record": FleetWish(nodes=9).encode()})

    wish = await status._wish(redis_url, directory)

    assert "not signed" in wish["refused"]
    console = Console(file=io.StringIO(), width=200)
    show_status({"fleet": "f", "phase": "ready", "endpoint": "e", "nodes": [], "workers": [],
                 "degraded": [], "hit_rate": {}, "wish": wish}, console)  # fmt: skip
    assert "the fleet's wish is not followed" in console.file.getvalue()
