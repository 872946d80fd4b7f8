"""What a live fleet has learned of its engines and links, for a simulation of one like it."""

import asyncio
import statistics
from dataclasses import dataclass
from typing import Annotated, Any

import aiohttp
import msgspec
from msgspec import Meta, Struct

from prefixfleet.router.candidates import read_link
from prefixfleet.router.estimate import KILO, UNMEASURED
from prefixfleet.router.fleet_models import Hardware, ModelShape
from prefixfleet.store.errors import ConfigError

ASK_S = 10.0
TYPICAL = 8 * KILO
"""Tokens of the prompt by whose seconds workers are compared."""

Number = Annotated[float, Meta(ge=0, le=1e9)]
Count = Annotated[int, Meta(ge=0, le=1 << 40)]


class _Prefill(Struct):
    step_s: Number
    s_per_thousand: Number
    s_per_million: Number
    samples: Count

    def typical_s(self) -> float:
        n = TYPICAL / KILO
        return self.step_s + n * self.s_per_thousand + n * n * self.s_per_million


class _Worker(Struct):
    block_tokens: (
        Annotated[int, Meta(ge=1, le=1 << 20)] | None
    )  # a plain engine says no size of its blocks
    block_bytes: Count
    prefill: _Prefill


class _Node(Struct):
    stats: dict[str, Any]


class _Status(Struct):
    workers: list[_Worker]
    nodes: list[_Node]


@dataclass(frozen=True, slots=True)
class Learned:
    """A fleet's typical engine, link and memory (tokens a node), and what was only assumed."""

    shape: ModelShape
    hardware: Hardware
    memory_tokens: int | None
    assumed: tuple[str, ...]


async def ask(endpoint: str, api_key: str) -> bytes:
    """The status of the router there. Raises `ConfigError` if there is none to be had."""
    url = endpoint.rstrip("/") + "/status"
    headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
    try:
        async with (
            aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(ASK_S), headers=headers) as session,
            session.get(url) as answer,
        ):
            if answer.status != 200:
                raise ConfigError(f"{url}: got HTTP {answer.status}, expected a router's status")
            return await answer.read()
    except (aiohttp.ClientError, TimeoutError, ValueError) as error:
        raise ConfigError(
            f"{url} does not answer ({type(error).__name__}); does the router run?"
        ) from error


def learned(status: bytes) -> Learned:
    """What a router's ``/status`` tells: the engine whose seconds are the median, the median link.

    Raises `ConfigError` where no engine was observed yet, or if it is no such status.
    """
    try:
        read = msgspec.json.decode(status, type=_Status)
    except msgspec.DecodeError as error:
        raise ConfigError(f"/status: got none of a router of this version ({error})") from error
    known = [w for w in read.workers if w.prefill.samples and w.block_tokens and w.block_bytes]
    if not known:
        raise ConfigError(
            "no prefill of an engine with our connector was observed yet: send the fleet requests, "
            "one after the other, or name --hardware"
        )
    if not all(w.prefill.typical_s() for w in known):
        raise ConfigError(
            "/status: got a worker with samples whose prefill takes no time (all coefficients 0), "
            "expected seconds"
        )
    by_seconds = sorted(known, key=lambda w: w.prefill.typical_s())
    worker = by_seconds[(len(by_seconds) - 1) // 2]
    hardware, assumed = _hardware(worker.prefill, read.nodes)
    return Learned(_shape(worker), hardware, _memory_tokens(worker, read.nodes), assumed)


def _shape(worker: _Worker) -> ModelShape:
    """In units in which the engine's arithmetic is one a second: the learned coefficients."""
    prefill, block_tokens = worker.prefill, worker.block_tokens or 1
    return ModelShape(
        layers=1,
        hidden=1,
        attention=prefill.s_per_million / KILO**2,
        products=prefill.s_per_thousand / KILO,
        kv_bytes_per_token=max(1, round(worker.block_bytes / block_tokens)),
    )


def _hardware(prefill: _Prefill, nodes: list[_Node]) -> tuple[Hardware, tuple[str, ...]]:
    links = [
        link
        for node in nodes
        for measured in _map(node.stats.get("links")).values()
        if (link := read_link(measured))
    ]
    hardware = Hardware(
        flops=1.0,
        utilisation=1.0,
        link_bytes_per_s=statistics.median(x.bytes_per_s for x in links or [UNMEASURED]),
        link_setup_s=statistics.median(x.setup_s for x in links or [UNMEASURED]),
        step_s=prefill.step_s,
    )
    gb_per_s = UNMEASURED.bytes_per_s / 1e9
    return hardware, () if links else (f"no link was measured yet: {gb_per_s:g} GB/s assumed",)


def _memory_tokens(worker: _Worker, nodes: list[_Node]) -> int | None:
    """Of a node's memory tier; None where no node tells."""
    slots = [_map(_map(node.stats.get("tiers")).get("dram")).get("slots") for node in nodes]
    told = [count for count in slots if isinstance(count, int) and count > 0]
    return int(statistics.median(told)) * (worker.block_tokens or 1) if told else None


def _map(value: object) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}


def calibration(endpoint: str, api_key: str) -> Learned:
    """`learned` of the router at ``endpoint``."""
    return learned(asyncio.run(ask(endpoint, api_key)))
