"""What runs on which host of a Ray cluster: pure; knows Ray's description of a node, not Ray.

A host asks by the resources it was started with: ``prefixfleet_engines`` for so many engines and
one node daemon, ``prefixfleet_router`` for a router. Its GPUs are shared out evenly.
"""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

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


def places(ray_nodes: Iterable[Mapping[str, Any]]) -> dict[str, Place]:
    """Everything that should run on the hosts that live, by actor name."""
    wanted = [place for node in ray_nodes if node["Alive"] for place in _of_host(node)]
    return {place.actor: place for place in wanted}


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
