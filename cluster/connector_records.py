"""What the connector's scheduler half and its worker halves tell each other, once a step.

The scheduler half decides, every rank does the same; each rank reports, and the scheduler half
acts when all have. Frozen and picklable.
"""

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorWorkerMetadata,
)

from prefixfleet.store.chain import BlockHash


@dataclass(frozen=True, slots=True)
class Load:
    """Copy slots of the pool into blocks of the engine: (slot, hash, block id) each."""

    request: str
    blocks: tuple[tuple[int, BlockHash, int], ...]


@dataclass(frozen=True, slots=True)
class Save:
    """Copy full blocks of the engine into the pool: (hash, block id) each, following ``parent``.

    ``number`` names the save in reports; the blocks stay as they are until all ranks reported it.
    """

    number: int
    request: str
    parent: BlockHash
    blocks: tuple[tuple[BlockHash, int], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Step(KVConnectorMetadata):  # type: ignore[misc]
    """One engine step's work."""

    loads: tuple[Load, ...] = ()
    saves: tuple[Save, ...] = ()
    cancelled: frozenset[int] = frozenset()  # saves whose blocks may be overwritten in this step
    finishing: frozenset[str] = frozenset()  # requests whose blocks wait for their saves
    idle: bool = False  # nothing is computed in this step
    era: str = ""  # changes when the engine's caches were reset; part of the namespace


@dataclass(slots=True)
class Report(KVConnectorWorkerMetadata):  # type: ignore[misc]
    """What ranks did since their last report; `aggregate` adds another rank's."""

    saves: Counter[int] = field(default_factory=Counter)  # ranks that are done with a save
    failed_loads: dict[str, int] = field(default_factory=dict)  # request: blocks before the fault
    dropped_blocks: int = 0  # of saves that failed
    load_s: dict[str, float] = field(default_factory=dict)  # of copying in; of the slowest rank

    def aggregate(self, other: KVConnectorWorkerMetadata) -> "Report":
        """Both reports in one."""
        assert isinstance(other, Report)
        failed = dict(self.failed_loads)
        for request, good in other.failed_loads.items():
            failed[request] = min(good, failed.get(request, good))
        dropped = self.dropped_blocks + other.dropped_blocks
        load_s = dict(self.load_s)
        for request, seconds in other.load_s.items():
            load_s[request] = max(seconds, load_s.get(request, 0.0))
        return Report(self.saves + other.saves, failed, dropped, load_s)


@dataclass(frozen=True, slots=True, kw_only=True)
class Handshake(KVConnectorHandshakeMetadata):  # type: ignore[misc]
    """What a rank found when it loaded the model; all ranks must agree on it."""

    namespace: dict[str, Any]  # fields of `Namespace`
    payload_bytes: int  # of this rank's share of a block
