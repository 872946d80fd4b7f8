"""The node's pool as an engine rank sees it: the daemon's file, mapped, one shard of each slot.

Must not know requests or vLLM. What it maps is what the connection's daemon said; a daemon that
comes back has a new file, and what was copied from the old one was proved by itself.
"""

import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import msgspec

from prefixfleet.cluster.engine_channel import join_hashes
from prefixfleet.cluster.engine_client import EngineClient, Welcome
from prefixfleet.store.chain import BlockHash
from prefixfleet.store.errors import EpochChanged, PeerLost, ProtocolError
from prefixfleet.store.mapping import map_shared
from prefixfleet.store.populate import Populating
from prefixfleet.store.slot import SlotLayout, copy_out, seal

ASK_S = 2.0
"""For an answer about slots; the daemon may have to make room first."""


@dataclass(frozen=True, slots=True)
class _Mapped:
    welcome: Welcome
    memory: memoryview
    populating: Populating


class RankPool:
    """Slots of the node's pool, read and written by one rank.

    Owned by the copier's thread. Every method raises `FleetError` when the daemon is away, late
    or wrong; a block is then simply not copied.
    """

    def __init__(self, client: EngineClient, layout: SlotLayout, rank: int) -> None:
        self._client = client
        self._layout = layout
        self._rank = rank
        self._mapped: _Mapped | None = None
        self._reserved: _Mapped | None = None

    def copy_out(self, slot: int, block: BlockHash, target: memoryview) -> None:
        """Copy a block's shard, proved. Raises `CorruptBlock` if the slot holds anything else."""
        mapped = self._current()
        memory = self._slot(mapped, slot)
        copy_out(memory, self._layout, mapped.welcome.namespace_digest, block, self._rank, target)

    def reserve(self, parent: BlockHash, blocks: Sequence[BlockHash]) -> list[int]:
        """Slots to write, aligned with ``blocks``; below 0 where there is nothing to write.

        They are good until the next `reserve`, and only as long as the daemon lives.
        """
        self._reserved = self._current()
        answer = self._ask(
            "reserve", parent=parent, hashes=join_hashes(list(blocks)), rank=self._rank
        )
        try:
            slots = msgspec.convert(answer.get("slots"), list[int])
        except msgspec.ValidationError as error:
            raise ProtocolError(f"answer to reserve: {error}") from error
        if len(slots) != len(blocks):
            raise ProtocolError(f"answer to reserve: {len(slots)} slots for {len(blocks)} blocks")
        return slots

    def payload(self, slot: int) -> memoryview:
        """Where this rank's shard of a reserved slot is written."""
        return self._layout.payload(self._slot(self._writable(), slot), self._rank)

    def commit(self, written: Sequence[tuple[BlockHash, int]]) -> None:
        """Seal the shards of (block, slot) and tell the daemon that they are whole."""
        mapped = self._writable()
        for block, slot in written:
            memory = self._slot(mapped, slot)
            seal(memory, self._layout, mapped.welcome.namespace_digest, block, self._rank)
        self._ask("commit", hashes=join_hashes([b for b, _ in written]), rank=self._rank)

    def tell(self, op: Literal["abandon", "discard"], blocks: Sequence[BlockHash]) -> None:
        """Give reserved slots back, or name blocks whose bytes are damaged."""
        rank = {"rank": self._rank} if op == "abandon" else {}
        self._ask(op, hashes=join_hashes(list(blocks)), **rank)

    def close(self) -> None:
        """Nothing is copied any more: no further page of the pool is wanted."""
        if self._mapped is not None:
            self._mapped.populating.stop()

    def _ask(self, op: str, **fields: Any) -> dict[str, Any]:  # noqa: ANN401 - msgpack
        try:
            # the client fails the answer at ASK_S; the second limit holds if its thread is gone
            return self._client.ask(op, within_s=ASK_S, **fields).result(2 * ASK_S)
        except TimeoutError as error:
            raise PeerLost("the engine channel's thread does not answer") from error

    def _current(self) -> _Mapped:
        welcome = self._client.settle(ASK_S)  # an engine's first load may come before the hello
        if self._mapped is not None and self._mapped.welcome != welcome:
            self._mapped.populating.stop()
            self._mapped = None
        if welcome is None:
            raise PeerLost("there is no node daemon")
        if self._mapped is None:
            memory = _map(welcome)
            self._mapped = _Mapped(welcome, memory, Populating(memory, huge=False))
        return self._mapped

    def _writable(self) -> _Mapped:
        """The mapping that the reserved slots are of, never that of a later daemon."""
        mapped = self._current()
        if mapped is not self._reserved:
            raise EpochChanged("the node daemon was replaced since the slots were reserved")
        return mapped

    def _slot(self, mapped: _Mapped, slot: int) -> memoryview:
        start = slot * self._layout.slot_bytes
        if slot < 0 or start + self._layout.slot_bytes > len(mapped.memory):
            raise ProtocolError(f"slot {slot} is outside of a pool of {len(mapped.memory)} bytes")
        return mapped.memory[start : start + self._layout.slot_bytes]


def _map(welcome: Welcome) -> memoryview:
    try:
        fd = os.open(welcome.pool_path, os.O_RDWR | os.O_CLOEXEC)
        try:
            # touching a page beyond the file's end would kill the process
            if (size := os.fstat(fd).st_size) < welcome.pool_bytes:
                raise ProtocolError(
                    f"pool {welcome.pool_path}: {size} bytes, announced {welcome.pool_bytes}"
                )
            return map_shared(fd, welcome.pool_bytes)
        finally:
            os.close(fd)
    except OSError as error:
        raise PeerLost(f"pool {welcome.pool_path}: {error}") from error
