"""What `prefixfleet top` shows of a router's snapshot; anything else is no snapshot. Pure."""

from typing import Any

import msgspec

from prefixfleet.store.errors import ConfigError


class _Node(msgspec.Struct):
    node: str
    lease: str
    stats: dict[str, Any]


class _Worker(msgspec.Struct):
    state: str


class _View(msgspec.Struct):
    blocks: int


class _Mode(msgspec.Struct):
    reason: str
    remedy: str


class _Spread(msgspec.Struct):
    mean: float
    p50: float
    p90: float
    p99: float


class _Times(msgspec.Struct):
    observed: _Spread
    without_cache: _Spread
    estimated: _Spread


class _Prefix(msgspec.Struct):
    prefix: str
    tokens: int
    requests: int
    children: list["_Prefix"]


class _Decision(msgspec.Struct):
    at: float
    node: str
    tokens: int
    local: int
    pulled: int
    estimate_s: float
    ttft_s: float | None
    reason: str


class _Link(msgspec.Struct):
    source: str = msgspec.field(name="from")
    to: str
    link: str
    bytes_per_s: float
    setup_s: float
    pulls: int


class _Snapshot(msgspec.Struct):
    nodes: list[_Node]
    workers: list[_Worker]
    requests: int
    requests_in_flight: int
    waiting: int
    view: _View
    degraded: list[_Mode]
    tokens: dict[str, int]
    hit_rate: _Spread
    ttft_s: _Times
    hit_histogram: list[int]
    prefixes: list[_Prefix]
    links: list[_Link]
    decisions: list[_Decision]


def checked(snapshot: object, base: str) -> dict[str, Any]:
    """``snapshot`` as it is. Raises `ConfigError` if a field is missing or is something else."""
    try:
        found = msgspec.convert(snapshot, _Snapshot)
        if not found.hit_histogram:
            raise msgspec.ValidationError("no bins - at `$.hit_histogram`")
    except msgspec.ValidationError as error:
        raise ConfigError(
            f"{base}: got {snapshot!r:.200}, expected a router's snapshot of this version ({error})"
        ) from error
    assert isinstance(snapshot, dict)
    return snapshot
