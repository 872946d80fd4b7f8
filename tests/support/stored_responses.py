"""Fleets whose engines store responses, and what their clients do."""

import json
from collections.abc import Mapping
from contextlib import ExitStack
from typing import Any
from urllib.parse import quote

from router_rig import Rig
from upstreams import storing


async def fleet(rig: Rig, names: str = "ab", **settings: Any) -> dict[str, Any]:
    """Engines that store, with a router in front of them."""
    engines = {name: await rig.engine(name, behave=storing) for name in names}
    await rig.start(*engines.values(), **settings)
    return engines


async def replica(rig: Rig, engines: Mapping[str, Any], **settings: Any) -> Rig:
    """Another router of the same fleet."""
    other = Rig(rig.folder, rig.stack, rig.redis_url, fleet=rig.fleet)
    await other.start(*engines.values(), **settings)
    return other


def of(tenant: str) -> dict[str, str]:
    """Headers of a tenant's key; none without one."""
    return {"Authorization": f"Bearer key-{tenant}"} if tenant else {}


async def create(rig: Rig, tenant: str = "", **fields: Any) -> tuple[int, Any, Any]:
    """Status, headers and answer of a response."""
    body = {"model": "tiny", "input": "hello"} | fields
    async with rig.client.post("/v1/responses", json=body, headers=of(tenant)) as answer:
        return answer.status, answer.headers, await answer.json()


async def create_on(rig: Rig, name: str) -> Any:
    """A response that this one of the workers a, b and c makes: the others are busy."""
    with ExitStack() as stack:
        for other in {*"abc"} - {name}:
            busy = rig.router.book.charged(other, tokens=50_000, sequences=1, expected_s=50)
            stack.enter_context(busy)
        return (await create(rig))[2]


async def ask(
    rig: Rig, path: str, method: str = "GET", tenant: str = "", **options: Any
) -> tuple[int, Any, bytes]:
    """Status, headers and bytes of an answer."""
    headers = of(tenant) | options.pop("headers", {})
    async with rig.client.request(method, path, headers=headers, **options) as answer:
        return answer.status, answer.headers, await answer.read()


def error(raw: bytes) -> Any:
    """The error of an answer in OpenAI's shape."""
    return json.loads(raw)["error"]


def path_of(response: str) -> str:
    """Where a response of that id is read."""
    return f"/v1/responses/{quote(response, safe='')}"


def count(rig: Rig, asked: str, result: str) -> float:
    """How often that was asked with that result, as the metric has it."""
    return float(rig.router.metrics.stored_responses.labels(asked, result)._value.get())
