"""Which engines a node takes: those whose blocks fit into its memory, alone or beside others."""

from collections.abc import Sequence
from dataclasses import fields

from prefixfleet.cluster.pool_host import Kind
from prefixfleet.store.errors import ConfigError
from prefixfleet.store.namespace import Namespace
from prefixfleet.store.slabs import Slabs

MAX_KINDS = 8
"""Namespaces of one node; one more is refused."""
ELSEWHERE = "or give it a node daemon of its own"


def check_first(kind: Kind, pool_bytes: int) -> None:
    """Raises `ConfigError` if not one slot fits."""
    if pool_bytes < kind.layout.slot_bytes:
        raise ConfigError(
            f"a block of this engine takes {kind.layout.slot_bytes} bytes, the pool has "
            f"{pool_bytes}; set PREFIXFLEET_NODE_POOL_BYTES higher"
        )


def check_shared(slabs: Slabs, kind: Kind, others: Sequence[Kind]) -> None:
    """Raises `ConfigError` if blocks of ``kind`` cannot lie beside those of ``others``, or are of
    the same weights in another encoding: nobody wants that, and nobody would see it."""
    for other in others:
        _check_encoding(kind.namespace, other.namespace)
    if len(others) >= MAX_KINDS:
        raise ConfigError(
            f"engine refused: {_differs(kind, others[0])}, and blocks of {MAX_KINDS} namespaces "
            f"lie on this node already; run its engines alike, {ELSEWHERE}"
        )
    largest = max(k.layout.slot_bytes for k in (kind, *others))
    if largest > slabs.most_slot_bytes:
        raise ConfigError(
            f"engine refused: {_differs(kind, others[0])}, and a pool of {slabs.size_bytes} bytes "
            f"that several share takes blocks of at most {slabs.most_slot_bytes} bytes: one of "
            f"these has {largest}. Run the engines alike, set PREFIXFLEET_NODE_POOL_BYTES to at "
            f"least {slabs.least_size(largest)}, {ELSEWHERE}"
        )


def _check_encoding(ours: Namespace, theirs: Namespace) -> None:
    if ours.weights == theirs.weights and ours.encoding != theirs.encoding:
        raise ConfigError(
            f"engine refused: blocks stored as {ours.encoding!r}, this node's pool holds "
            f"{theirs.encoding!r} of the same weights; set PREFIXFLEET_WORKER_ENCODING alike for "
            f"all, {ELSEWHERE}"
        )


def _differs(kind: Kind, first: Kind) -> str:
    mine, theirs = kind.namespace, first.namespace
    found = [
        f"{name} ({getattr(mine, name)!r} beside {getattr(theirs, name)!r})"
        for name in (field.name for field in fields(Namespace))
        if getattr(mine, name) != getattr(theirs, name)
    ]
    return f"its namespace differs from that of the blocks on this node in {', '.join(found)}"
