"""Which namespaces give up their place on a node, which has a bounded number of them. Pure."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

Name = TypeVar("Name")


@dataclass(frozen=True, slots=True)
class Absent(Generic[Name]):
    """A namespace whose engines are all gone, for ``away_s``. ``over``: it was an engine's own, and
    nobody will ask for it; ``wished``: somebody wished to keep some of it."""

    name: Name
    away_s: float
    over: bool = False
    wished: bool = False


def who_ends(absent: Sequence[Absent[Name]], beyond: int) -> frozenset[Name]:
    """What is over, but for wishes, and as many of those that are ``absent`` as there are
    namespaces ``beyond`` the places: whose engines left longest ago first, wishes last."""
    order = sorted(absent, key=lambda one: (not one.over, one.wished, -one.away_s))
    over = [one for one in absent if one.over and not one.wished]
    return frozenset(one.name for one in (*order[: max(0, beyond)], *over))
