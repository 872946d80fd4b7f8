"""What is known of a prompt on each worker, in the form in which the policy compares it. No I/O."""

import heapq
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TypeGuard

from msgspec import Struct, structs

from prefixfleet.router.charge import Load
from prefixfleet.router.decision import Candidate, Source
from prefixfleet.router.estimate import UNMEASURED, LinkSpeed, PrefillModel
from prefixfleet.router.lineup import Links
from prefixfleet.router.worker import Worker
from prefixfleet.store.records import NodeRecord

MAX_BLOCK_S = 60.0  # no node's block takes longer, whatever its record says
MAX_SETUP_S = 3_600.0  # of a link, likewise
MAX_BYTES_PER_S = 1e13
MAX_QUEUE_S = 60.0  # of a source: no read lease lasts longer
MAX_SOURCES = 16  # that are compared for one worker: a prefix that all nodes hold has too many


class Findings(Struct, kw_only=True):
    """Who has how many leading blocks of one prompt, in one namespace."""

    held: Mapping[str, int]  # by node
    expected: Mapping[str, int]  # by node: prompts that were sent there just now
    own: Mapping[str, int]  # by worker: in the engine's own cache
    sources: Sequence[Source]

    @property
    def reach(self) -> int:
        """Blocks that can be had from others, at most."""
        return self.sources[0].blocks if self.sources else 0

    def hit(self, node: str) -> int:
        """Blocks that ``node`` holds or will hold."""
        return max(self.held.get(node, 0), self.expected.get(node, 0))

    def nodes(self) -> Iterable[str]:
        """Nodes that are not like the others; always in the same order, some twice."""
        return (*self.held, *self.expected)


def candidate(
    worker: Worker,
    findings: Findings,
    load: Load,
    busy_s: float,
    prefill: PrefillModel,
    sources: Sequence[Source],
    block_s: float = 0.0,
) -> Candidate:
    """``worker`` as the policy sees it; ``block_s`` counts for what its node holds."""
    record = worker.record
    return Candidate(
        worker=record.worker,
        node=record.node,
        hit_blocks=findings.hit(record.node),
        own_blocks=findings.own.get(record.worker, 0),
        queued_tokens=load.queued_tokens,
        queued_requests=load.queued_requests,
        busy_s=busy_s,
        prefill=prefill,
        block_tokens=worker.block_tokens,
        block_bytes=record.block_bytes,
        sources=sources,
        block_s=block_s,
    )


def longest(
    held: Mapping[str, tuple[int, int]],
    waits_s: Mapping[str, float],
    block_s: Callable[[str], float] = lambda node: 0.0,
) -> list[Source]:
    """Who holds most, the least asked first, as if no link had been measured.

    ``held`` has the epoch and the blocks of each node that can be pulled from, ``waits_s`` the
    seconds until it has sent what was planned before; ``block_s`` gives a node's seconds a block.
    """
    first = heapq.nsmallest(
        MAX_SOURCES, held, key=lambda node: (-held[node][1], waits_s.get(node, 0.0))
    )
    return [
        Source(
            node=node,
            epoch=held[node][0],
            blocks=held[node][1],
            link=UNMEASURED,
            wait_s=waits_s.get(node, 0.0),
            block_s=block_s(node),
        )
        for node in first
    ]


def over_links(
    node: str, links: Links, sources: Sequence[Source], told_s: float = 0.0
) -> Sequence[Source]:
    """``sources`` with the links that ``node`` has measured, and the queues that it met there, as
    it told ``told_s`` seconds ago; a node is none for itself.

    The very same ``sources`` where nothing is to be changed: the policy sees by that who is
    alike.
    """
    if links:
        return [
            _over(source, links.get(source.node), told_s)
            for source in sources
            if source.node != node
        ]
    if sources and any(source.node == node for source in sources):
        return [source for source in sources if source.node != node]
    return sources


def _over(source: Source, measured: object, told_s: float) -> Source:
    link = read_link(measured)
    if link is None:
        return source
    queue_s = read_queue_s(measured, link, told_s)
    return structs.replace(source, link=link, wait_s=max(source.wait_s, queue_s))


def read_queue_s(measured: object, link: LinkSpeed, told_s: float) -> float:
    """Seconds until a source has sent what it had promised to others, by the record of a node that
    came ``told_s`` seconds ago; 0 for what says nothing.

    Not added to what this router has planned from there: the source counts that too.
    """
    queued = measured.get("queued_bytes") if isinstance(measured, dict) else None
    if not _is_number(queued) or queued <= 0:
        return 0.0
    return max(0.0, min(queued / max(link.bytes_per_s, 1.0), MAX_QUEUE_S) - told_s)


def read_link(measured: object) -> LinkSpeed | None:
    """A link as a node's record has it; None for what is none."""
    if not isinstance(measured, dict):
        return None
    speed, setup = measured.get("bytes_per_s"), measured.get("setup_s")
    if not _is_number(speed) or not _is_number(setup) or speed <= 0:
        return None
    return LinkSpeed(
        bytes_per_s=min(float(speed), MAX_BYTES_PER_S),
        setup_s=min(max(0.0, float(setup)), MAX_SETUP_S),
    )


def _is_number(value: object) -> TypeGuard[float]:
    """Of a size: sums and quotients of it are numbers too."""
    return isinstance(value, int | float) and math.isfinite(value)


def read_block_s(record: NodeRecord | None, namespace: bytes) -> float:
    """Seconds that a block of ``namespace`` held by a node takes to load, by its record; 0 where
    it says none. Models whose blocks are larger, or lie on disk, are slower on the same node."""
    kinds = record.stats.get("kinds") if record else None
    kind = kinds.get(namespace.hex()) if isinstance(kinds, dict) else None
    seconds = kind.get("block_s") if isinstance(kind, dict) else None
    if not isinstance(seconds, int | float) or not seconds > 0:
        return 0.0
    return min(float(seconds), MAX_BLOCK_S)
