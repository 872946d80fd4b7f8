"""What runs on which host of a Ray cluster: pure; knows Ray's description of a node, not Ray.

A host asks by the resources it was started with: ``prefixfleet_engines`` for so many engines and
one node daemon, ``prefixfleet_router`` for a router. Its GPUs are shared out evenly.
"""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from prefixfleet.store.records import FleetWish

ENGINES = "prefixfleet_engines"
ROUTER = "prefixfleet_router"
MAX_NAME = 36
"""A node's name may have 40 characters; an engine's adds its number."""


@dataclass(frozen=True, slots=True)
class Place:
    """One process to keep on one host. ``given`` are the settings that depend on the place; all
    others are the host's own. ``actor`` is unique over the host's lives under Ray."""

    actor: str
    kind: str  # "node" | "worker" | "router"
    ray_node: str
    given: Mapping[str, str]
    gpus: float = 0.0
    number: int = 0
    of: int = 1

    @property
    def node(self) -> str:
        """Name of the node it belongs to; empty for what belongs to none."""
        return self.given.get("PREFIXFLEET_NODE_NAME", "")

    @property
    def worker(self) -> str:
        """Name of the worker; empty for what is none."""
        return self.given.get("PREFIXFLEET_WORKER_NAME", "")


def places(ray_nodes: Iterable[Mapping[str, Any]]) -> dict[str, Place]:
    """Everything that should run on the hosts that live, by actor name."""
    wanted = [place for node in ray_nodes if node["Alive"] for place in _of_host(node)]
    return {place.actor: place for place in wanted}


def engine_hosts(wanted: Mapping[str, Place]) -> dict[str, list[Place]]:
    """The places of each node, by its name, in order of names."""
    hosts: dict[str, list[Place]] = {}
    for place in wanted.values():
        if place.node:
            hosts.setdefault(place.node, []).append(place)
    return dict(sorted(hosts.items()))


def chosen(wanted: Mapping[str, Place], there: Iterable[str], nodes: int) -> dict[str, Place]:
    """``wanted``, with engines on at most ``nodes`` hosts (0: on all). Hosts whose actors are
    ``there`` stay: who is to go is not decided here."""
    hosts, there = engine_hosts(wanted), set(there)
    kept = [n for n, placed in hosts.items() if there & {p.actor for p in placed}]
    others = [n for n in hosts if n not in kept]
    room = max(0, nodes - len(kept)) if nodes else len(others)
    names = {"", *kept, *others[:room]}
    return {actor: place for actor, place in wanted.items() if place.node in names}


def updated(place: Place, wish: FleetWish) -> Place:
    """The place with the settings of an update; those of the place itself stay."""
    if place.kind != "worker":
        return place
    rollout = {"PREFIXFLEET_WORKER_ROLLOUT": str(wish.rollout)}
    return replace(place, given={**wish.environ, **place.given, **rollout})


def host_name(name: str) -> str:
    """A host's name as the name of a node: its end, since that is what differs."""
    plain = re.sub(r"[^a-z0-9-]", "-", name.lower())
    return plain[-MAX_NAME:].strip("-") or "host"


def _of_host(node: Mapping[str, Any]) -> Iterable[Place]:
    resources = node["Resources"]
    ray_node, address = node["NodeID"], node["NodeManagerAddress"]
    name, life = host_name(node["NodeManagerHostname"]), ray_node[:8]
    if resources.get(ROUTER):
        yield Place(f"router-{name}-{life}", "router", ray_node, {})
    engines = int(resources.get(ENGINES, 0))
    if not engines:
        return
    here = {"PREFIXFLEET_NODE_NAME": name, "PREFIXFLEET_NODE_HOST": address}
    yield Place(f"node-{name}-{life}", "node", ray_node, here)
    for number in range(engines):
        worker = {
            "PREFIXFLEET_WORKER_NAME": f"{name}-{number}",
            "PREFIXFLEET_WORKER_NODE": name,
            "PREFIXFLEET_WORKER_HOST": address,
        }
        yield Place(
            actor=f"worker-{name}-{number}-{life}",
            kind="worker",
            ray_node=ray_node,
            given=here | worker,
            gpus=resources.get("GPU", 0.0) / engines,
            number=number,
            of=engines,
        )
