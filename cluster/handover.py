"""Before a node leaves for good, peers take the blocks that nobody else has.

Each chain of blocks with a last copy among them is offered to the peer with the most free slots,
as a prefetch of a router would be; the peer pulls it like any other. Best effort, within a
deadline: what nobody takes is recomputed when it is wanted.
"""

import asyncio
import json
import logging
import uuid
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import aiohttp

from prefixfleet.store.chain import BlockHash
from prefixfleet.store.errors import IndexUnavailable, PeerRefused, ProtocolError
from prefixfleet.store.index import Membership, PrefixIndex
from prefixfleet.store.prefetch import (
    PREFETCH_PATH,
    SIGNATURE_HEADER,
    Prefetch,
    encode_prefetch,
    is_signed,
    sign,
)
from prefixfleet.store.records import NodeRecord, PullPlan

AT_ONCE = 4
"""Chains on their way together: more would only share the same link."""
LOOK_S = 0.1
POST_S = 5.0
HANDOVER_S = 30.0
"""The longest a node that goes for good gives blocks away."""
MAX_WITHIN_S = 600.0
HANDOVER_PATH = "/handover"
"""Of a node's HTTP: ``POST`` with `encode_request`, signed as a prefetch is."""

log = logging.getLogger(__name__)

Segments = Callable[[Iterable[BlockHash]], Mapping[BlockHash, Sequence[BlockHash]]]


@dataclass(frozen=True, slots=True)
class HandedOver:
    """Blocks that had no other copy in the fleet: how many, and how many have one now."""

    last_copies: int
    taken: int

    def __add__(self, other: "HandedOver") -> "HandedOver":
        return HandedOver(self.last_copies + other.last_copies, self.taken + other.taken)


@dataclass(frozen=True, slots=True, kw_only=True)
class Leaving:
    """The node that leaves: who it is in the index, what its blocks are, and the fleet's
    prefetch key."""

    member: Membership
    namespace: bytes
    key: bytes


@dataclass(slots=True)
class _Peer:
    record: NodeRecord
    room: int


async def hand_over(
    leaving: Leaving,
    index: PrefixIndex,
    chains: Sequence[Sequence[BlockHash]],
    segments: Segments,
    deadline: float,
) -> HandedOver:
    """Offer what would be lost; returns when it was taken, or at ``deadline`` (loop's clock).

    Serve pulls meanwhile. Without the index nobody would find the copies: nothing is offered.
    """
    clock = asyncio.get_running_loop().time
    try:
        last = await _last_copies(index, chains, segments)
        peers = [
            _Peer(record, _room(record, leaving.namespace))
            for member, record in await index.members()
            if member.node != leaving.member.node and record.http
        ]
    except IndexUnavailable as error:
        log.warning("blocks are not handed over: %s", error)
        return HandedOver(0, 0)
    offered = [chain for chain in chains if not last.isdisjoint(chain)]
    if not offered or not peers:
        return HandedOver(len(last), 0)
    slots = asyncio.Semaphore(AT_ONCE)
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=POST_S)) as session:

        async def offer(chain: Sequence[BlockHash]) -> None:
            async with slots:
                if await _post(session, leaving, chain, peers, deadline - clock()):
                    await _until_copied(index, segments, chain, deadline)

        await asyncio.gather(*(offer(chain) for chain in offered))
    try:
        left = await _last_copies(index, offered, segments)
    except IndexUnavailable:
        left = last
    return HandedOver(len(last), len(last) - len(last & left))


def encode_request(within_s: float) -> bytes:
    """Body of the request to hand over within so many seconds."""
    return json.dumps({"handover_within_s": within_s}).encode()


def open_request(body: bytes, signature: str, key: bytes) -> float:
    """Seconds in a request. Raises `PeerRefused` (wrong signature) or `ProtocolError`."""
    if not is_signed(body, signature, key):
        raise PeerRefused("handover: wrong signature; do all hosts have the same cluster secret?")
    try:
        within_s = float(json.loads(body)["handover_within_s"])
    except (ValueError, KeyError, TypeError) as error:
        raise ProtocolError(f"handover: {type(error).__name__}: {error}") from error
    if not 0 < within_s <= MAX_WITHIN_S:
        raise ProtocolError(f"handover: got {within_s:g} s, expected up to {MAX_WITHIN_S:g}")
    return within_s


async def ask_handover(url: str, key: bytes, within_s: float) -> HandedOver | None:
    """Ask the daemon at ``url``; what it gave away, or None if it does not answer."""
    body = encode_request(within_s)
    timeout = aiohttp.ClientTimeout(total=within_s + POST_S)
    try:
        async with (
            aiohttp.ClientSession(timeout=timeout) as session,
            session.post(
                url + HANDOVER_PATH, data=body, headers={SIGNATURE_HEADER: sign(body, key)}
            ) as response,
        ):
            answer = await response.json()
            return HandedOver(**answer) if response.status == 200 else None
    except (aiohttp.ClientError, TimeoutError, OSError, ValueError, TypeError) as error:
        log.warning("blocks of %s are not handed over: %r", url, error)
        return None


async def _last_copies(
    index: PrefixIndex, chains: Sequence[Sequence[BlockHash]], segments: Segments
) -> set[BlockHash]:
    blocks = {block for chain in chains for block in chain}
    copies = await index.copies(segments(blocks)) if blocks else {}
    return {block for block in blocks if copies.get(block, 0) <= 1}


def _room(record: NodeRecord, namespace: bytes) -> int:
    """Slots of the namespace that are free by what the node said last."""
    kind = record.stats.get("kinds", {}).get(namespace.hex(), {})
    return int(kind.get("slots", 0)) - int(kind.get("resident", 0))


async def _post(
    session: aiohttp.ClientSession,
    leaving: Leaving,
    chain: Sequence[BlockHash],
    peers: list[_Peer],
    budget_s: float,
) -> bool:
    """Whether a peer with room took the offer; the roomiest are asked first."""
    for peer in sorted(peers, key=lambda p: -p.room):
        if peer.room < len(chain) or budget_s <= 0:
            return False
        plan = PullPlan(
            request=f"handover-{uuid.uuid4().hex}",
            source=leaving.member.node,
            source_epoch=leaving.member.epoch,
            blocks=len(chain),
            budget_s=budget_s,
        )
        hint = Prefetch(plan=plan, namespace=leaving.namespace, chain=tuple(chain))
        body = encode_prefetch(hint)
        headers = {SIGNATURE_HEADER: sign(body, leaving.key)}
        peer.room -= len(chain)
        try:
            async with session.post(
                peer.record.http + PREFETCH_PATH, data=body, headers=headers
            ) as response:
                if response.status < 300:
                    return True
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            log.debug("%s takes nothing: %s", peer.record.node, error)
        peer.room += len(chain)
    return False


async def _until_copied(
    index: PrefixIndex, segments: Segments, chain: Sequence[BlockHash], deadline: float
) -> None:
    """Until the chain's end, which a pull brings last, is held twice, or time is over."""
    clock = asyncio.get_running_loop().time
    end = segments(chain[-1:])
    while clock() < deadline:
        try:
            copies = await index.copies(end)
        except IndexUnavailable:
            return
        if copies.get(chain[-1], 0) > 1:
            return
        await asyncio.sleep(LOOK_S)
