"""What `prefixfleet status` reads of a router's answer; anything else is no router's. Pure."""

from typing import Any

import msgspec

from prefixfleet.store.errors import ConfigError


class _Node(msgspec.Struct):
    node: str
    epoch: int | None
    lease: str
    stats: dict[str, Any]


class _Load(msgspec.Struct):
    queued_requests: int
    decoding: int


class _Worker(msgspec.Struct):
    worker: str
    node: str
    model: str
    state: str
    reason: str
    url: str
    load: _Load


class _Mode(msgspec.Struct):
    reason: str
    remedy: str


class _Status(msgspec.Struct):
    nodes: list[_Node]
    workers: list[_Worker]
    degraded: list[_Mode]
    hit_rate: dict[str, float]


def checked(status: object, url: str) -> dict[str, Any]:
    """``status`` as it is. Raises `ConfigError` if a field is missing or is something else."""
    try:
        msgspec.convert(status, _Status)
    except msgspec.ValidationError as error:
        raise ConfigError(
            f"{url}: got {status!r:.200}, expected a router's status of this version ({error})"
        ) from error
    assert isinstance(status, dict)
    return status
