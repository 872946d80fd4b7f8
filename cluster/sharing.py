"""Which engines a node takes: those whose blocks fit into its memory, alone or beside others."""

from collections.abc import Sequence
from dataclasses import fields

from prefixfleet.cluster.pool_host import Kind
from prefixfleet.store.errors import ConfigError
from prefixfleet.store.namespace import Namespace
from prefixfleet.store.slabs import Slabs

MAX_KINDS = 8
"""Models of one node; one more is refused while engines of so many are here."""
BACK_S = 3.0
"""So long the place of a model is kept whose connections have all ended: one that was cut comes
back at once, and a ninth that asks again and again must not have taken its place."""
MOST_POOLS = 2 * MAX_KINDS
"""With those whose engines left, and that give their place to others. Each has its books."""


def check_first(kind: Kind, pool_bytes: int) -> None:
    """Raises `ConfigError` if not one slot fits."""
    if pool_bytes < kind.layout.slot_bytes:
        raise ConfigError(
            f"a block of this engine takes {kind.layout.slot_bytes} bytes, the pool has "
            f"{pool_bytes}; set PREFIXFLEET_NODE_POOL_BYTES higher"
        )


def check_alike(kind: Kind, served: Sequence[Kind]) -> None:
    """Raises `ConfigError` if an engine is here, of those that are ``served``, that runs the same
    model otherwise: that is a mistake which nobody would see."""
    for other in served:
        if kind.namespace.weights == other.namespace.weights and kind.digest != other.digest:
            _refuse_same_model(kind, other)


def check_place(served: int) -> None:
    """Raises `ConfigError` if there is no place beside the namespaces that have engines here: one
    without gives its own up."""
    if served >= MAX_KINDS:
        raise ConfigError(
            f"engine refused: engines of {MAX_KINDS} models are on this node already; "
            "give it a node daemon of its own"
        )


def check_shared(slabs: Slabs, kind: Kind, others: Sequence[Kind]) -> None:
    """Raises `ConfigError` if blocks of ``kind`` cannot lie beside those of ``others``."""
    if len(others) >= MOST_POOLS:
        raise ConfigError(
            f"engine refused: blocks of {len(others)} models lie on this node, and those whose "
            "engines left are not gone yet; start it again in some seconds"
        )
    largest = max(k.layout.slot_bytes for k in (kind, *others))
    if largest > slabs.most_slot_bytes:
        raise ConfigError(
            f"engine refused: another model's blocks lie on this node ({_differs(kind, others[0])})"
            f", and a pool of {slabs.size_bytes} bytes that several share takes blocks of at most "
            f"{slabs.most_slot_bytes} bytes: one of these has {largest}; set "
            f"PREFIXFLEET_NODE_POOL_BYTES to at least {slabs.least_size(largest)}, or give it a "
            "node daemon of its own"
        )


def _refuse_same_model(kind: Kind, other: Kind) -> None:
    ours, theirs = kind.namespace.encoding, other.namespace.encoding
    what = f"its {_differs(kind, other)}"
    if ours != theirs:
        what = (
            f"blocks stored as {ours!r}, an engine here stores them as {theirs!r} (set "
            "PREFIXFLEET_WORKER_ENCODING alike for all)"
        )
    raise ConfigError(
        f"engine refused: {what}; engines of one model must run it the same way on a node (give "
        "another one a node daemon of its own)"
    )


def _differs(kind: Kind, other: Kind) -> str:
    mine, theirs = kind.namespace, other.namespace
    found = [
        f"{name} {getattr(mine, name)!r} beside {getattr(theirs, name)!r}"
        for name in (field.name for field in fields(Namespace))
        if getattr(mine, name) != getattr(theirs, name)
    ]
    return f"namespace differs in {', '.join(found)}"
