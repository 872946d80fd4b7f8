"""The policies that an operator can choose from, by the names that settings and simulator use."""

from collections.abc import Callable, Mapping
from typing import Literal, TypeAlias

from prefixfleet.router.decision import Policy
from prefixfleet.router.peer_policies import PEERS
from prefixfleet.router.policy import choose

PolicyName: TypeAlias = Literal[
    "ours",
    "random",
    "round-robin",
    "least-tokens",
    "local-aware",
    "algorithm-1",
    "dynamo",
    "sticky",
]

OURS: PolicyName = "ours"

POLICIES: Mapping[str, Callable[[], Policy]] = {OURS: lambda: choose, **PEERS}
"""Each call makes a fresh policy. A peers' one sends each request at once to the worker that it
names, as its system does; only ours lets requests wait in the router."""
