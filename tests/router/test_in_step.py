"""Requests that came together go from stage to stage together."""

import asyncio
import json

from prefixfleet.router.lane_client import LaneClient
from prefixfleet.router.plain_request import plain_head
from prefixfleet.router.routes import ROUTES
from prefixfleet.router.serve import serve_prompt

LIMIT_S = 30
BODY = json.dumps({"model": "tiny", "prompt": "hello"}).encode()
HEAD = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n" % len(BODY)


class Wire(asyncio.Transport):
    """Keeps what is written."""

    def __init__(self):
        super().__init__()
        self.written = b""

    def write(self, data):
        self.written += data

    def is_closing(self):
        return False


async def test_all_are_read_before_the_first_is_decided_and_decided_before_one_is_sent(
    rig, monkeypatch
):
    router = await rig.start(await rig.engine())
    route = next(route for route in ROUTES if route.path == "/v1/completions")
    stages, wires = [], [Wire() for _ in range(3)]

    def spy(owner, name, stage):
        real = getattr(owner, name)
        monkeypatch.setattr(owner, name, lambda *given: stages.append(stage) or real(*given))

    spy(router.dispatcher, "chains", "read")
    spy(router.dispatcher, "decide", "decided")
    spy(router.pool, "take_idle", "sent")
    clients = [LaneClient(asyncio.Protocol(), wire, plain_head(HEAD), BODY) for wire in wires]
    async with asyncio.timeout(LIMIT_S):
        statuses = await asyncio.gather(*(serve_prompt(router, c, route) for c in clients))

    assert statuses == [200] * 3
    assert stages == ["read"] * 3 + ["decided"] * 3 + ["sent"] * 3
    assert all(wire.written.startswith(b"HTTP/1.1 200") for wire in wires)
