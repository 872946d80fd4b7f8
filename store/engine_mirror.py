"""`EngineMirror`: which blocks one engine holds itself, as its KV events tell, in our hashes.

Rules learned from peers' faults: a sequence that goes back is a restarted engine, whose blocks are
all gone; a gap makes everything doubtful until it is replayed; one hash may have several copies,
each removed on its own, so copies are counted per medium and group.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum

from prefixfleet.store.chain import SEGMENT_BLOCKS, BlockHash, extend_chain
from prefixfleet.store.engine_events import (
    AllCleared,
    BlocksRemoved,
    BlocksStored,
    EngineEvent,
    EngineHash,
    EventBatch,
)

MAX_COPIES = 524_288
"""Of one engine's blocks: a terabyte of KV in blocks of 2 MiB, which is 16 tokens of 128 KiB each.
A copy takes half a kilobyte here."""


class Follow(Enum):
    """What became of a batch."""

    APPLIED = "applied"
    REPEATED = "repeated"  # seen before: a replay overlaps what came live
    RESTARTED = "restarted"  # the engine is new: all that was known is dropped, then applied
    GAP = "gap"  # batches are missing: nothing was applied, ask for a replay from `expected`


@dataclass(frozen=True, slots=True)
class Change:
    """Blocks that the engine holds now and did not before, or the other way round."""

    added: tuple[BlockHash, ...] = ()
    removed: tuple[BlockHash, ...] = ()


def joined(first: Change, then: Change) -> Change:
    """Both changes as one: what came and went again is in neither part."""
    if first == Change():
        return then
    came, went = set(first.added), set(first.removed)
    added = (came - set(then.removed)) | (set(then.added) - went)
    removed = (went - set(then.added)) | (set(then.removed) - came)
    return Change(tuple(added), tuple(removed))


class EngineMirror:
    """One engine's own cache. Owned by whoever follows that engine's events.

    ``root_of`` gives the chain's root for a salt, "" for none; ``adapter_root`` for a LoRA's name
    and a salt. Blocks with an image, or with a LoRA and no ``adapter_root``, are not named by
    their tokens, are not followed, and are counted in ``unfollowed``. Copies beyond
    `MAX_COPIES` are not believed and counted in ``refused``. ``is_full`` from then on, until half
    of that is free: what leaves makes room at once, but what was refused stays unknown.
    """

    def __init__(
        self,
        root_of: Callable[[str], BlockHash],
        block_tokens: int,
        key: bytes,
        adapter_root: Callable[[str, str], BlockHash] | None = None,
    ) -> None:
        self._root_of = root_of
        self._adapter_root = adapter_root
        self._block_tokens = block_tokens
        self._key = key
        self.expected: int | None = None  # next sequence; None before the first batch
        self.unfollowed = 0
        self.refused = 0
        self.is_full = False
        self.other_block_tokens = 0  # the engine's own block size, if it is not ours
        self._ours: dict[EngineHash, BlockHash] = {}
        self._places: dict[BlockHash, tuple[BlockHash, int]] = {}
        self._copies: Counter[tuple[EngineHash, str, int]] = Counter()
        self._held: Counter[EngineHash] = Counter()

    @property
    def held(self) -> frozenset[BlockHash]:
        """Every block the engine holds, in our hashes."""
        return frozenset(self._places)

    def __len__(self) -> int:
        """Blocks that the engine holds."""
        return len(self._places)

    def segment_head(self, block: BlockHash) -> BlockHash | None:
        """Head of the segment of a block, see `chain.segment_heads`; None for one that the engine
        does not hold."""
        place = self._places.get(block)
        return place[0] if place else None

    def follow(self, batch: EventBatch) -> tuple[Follow, Change]:
        """Apply one batch, live or replayed, in order of sequence."""
        dropped: tuple[BlockHash, ...] = ()
        outcome = Follow.APPLIED
        if self.expected is not None and batch.sequence != self.expected:
            if batch.sequence > self.expected:
                return Follow.GAP, Change()
            if batch.sequence != 0:
                return Follow.REPEATED, Change()
            dropped, outcome = self.forget().removed, Follow.RESTARTED
        self.expected = batch.sequence + 1
        change = self.more(batch.events)
        return outcome, joined(Change(removed=dropped), change) if dropped else change

    def more(self, events: Sequence[EngineEvent]) -> Change:
        """Apply further events of the batch that was followed last."""
        if len(events) == 1 and isinstance(events[0], AllCleared):
            return self._clear()  # by itself: sets of all blocks take ten times as long
        added, removed = self._apply(events)
        return Change(tuple(added), tuple(removed))

    def forget(self) -> Change:
        """Nothing is known any more: the engine restarted, or its events were lost for good."""
        self.expected = None
        return self._clear()

    def _clear(self) -> Change:
        removed = tuple(self._places)
        self.is_full = False
        self._ours.clear()
        self._places.clear()
        self._copies.clear()
        self._held.clear()
        return Change(removed=removed)

    def _apply(self, events: Sequence[EngineEvent]) -> tuple[set[BlockHash], set[BlockHash]]:
        added: set[BlockHash] = set()
        removed: set[BlockHash] = set()
        for event in events:
            match event:
                case BlocksStored():
                    new = self._store(event)
                    added |= new - removed  # what was held before the batch came back
                    removed -= new
                case BlocksRemoved():
                    old = self._remove(event)
                    removed |= old - added
                    added -= old
                case AllCleared():
                    removed |= set(self._clear().removed) - added
                    added.clear()
        return added, removed

    def _store(self, event: BlocksStored) -> set[BlockHash]:
        ours = self._hashes_of(event)
        above = None if event.parent is None else self._ours.get(event.parent)
        new = set()
        for name, block in zip(event.hashes, ours, strict=False):
            copy = (name, event.medium, event.group)
            if len(self._copies) >= MAX_COPIES and copy not in self._copies:
                self.refused, self.is_full = self.refused + 1, True
                continue
            self._copies[copy] += 1
            self._held[name] += 1
            if name not in self._ours:
                self._ours[name] = block
                self._place(block, above)
                new.add(block)
            above = block
        return new

    def _place(self, block: BlockHash, above: BlockHash | None) -> None:
        head, before = (block, -1) if above is None else self._places.get(above, (above, 0))
        position = before + 1
        self._places[block] = (head if position % SEGMENT_BLOCKS else block, position)

    def _hashes_of(self, event: BlocksStored) -> Sequence[BlockHash]:
        parent = self._root(event) if event.parent is None else self._ours.get(event.parent)
        whole = len(event.token_ids) == len(event.hashes) * event.block_tokens
        ours = event.block_tokens == self._block_tokens
        self.other_block_tokens = 0 if ours else event.block_tokens
        if event.scoped or parent is None or not whole or not ours:
            self.unfollowed += len(event.hashes)
            return ()
        return extend_chain(parent, event.token_ids, self._block_tokens, self._key)

    def _root(self, event: BlocksStored) -> BlockHash | None:
        if not event.lora:
            return self._root_of(event.salt)
        return self._adapter_root(event.lora, event.salt) if self._adapter_root else None

    def _remove(self, event: BlocksRemoved) -> set[BlockHash]:
        gone = set()
        for name in event.hashes:
            copy = (name, event.medium, event.group)
            if not self._copies[copy]:
                del self._copies[copy]  # Counter keeps the zero it was asked for
                continue
            self._copies[copy] -= 1
            self._held[name] -= 1
            if not self._copies[copy]:
                del self._copies[copy]
            if not self._held[name]:
                del self._held[name]
                block = self._ours.pop(name)
                self._places.pop(block, None)
                gone.add(block)
        self.is_full = self.is_full and len(self._copies) > MAX_COPIES // 2
        return gone
