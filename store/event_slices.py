"""Cuts what an engine told into slices, so that whoever shares the thread gets turns between them.

Pure. Slices applied in order say the same as the events that they were cut from.
"""

from collections.abc import Iterable, Iterator
from dataclasses import replace

from prefixfleet.store.engine_events import AllCleared, BlocksStored, EngineEvent
from prefixfleet.store.engine_mirror import Change

TURN = 2_000
"""Events and blocks of a slice, or blocks of a change."""


def slices(events: Iterable[EngineEvent]) -> Iterator[tuple[EngineEvent, ...]]:
    """Every event, in groups of at most `TURN` events and blocks; what drops all is by itself."""
    piece, size = list[EngineEvent](), 0
    for part in (part for event in events for part in _cut(event)):
        cost = TURN if isinstance(part, AllCleared) else 1 + len(part.hashes)
        if piece and size + cost > TURN:
            yield tuple(piece)
            piece, size = [], 0
        piece.append(part)
        size += cost
    if piece:
        yield tuple(piece)


def turns(change: Change) -> Iterator[Change]:
    """The change in parts of at most `TURN` blocks, what is gone first; one that is empty is told
    too.
    """
    if len(change.removed) + len(change.added) <= TURN:
        yield change
        return
    for start in range(0, len(change.removed), TURN):
        yield Change(removed=change.removed[start : start + TURN])
    for start in range(0, len(change.added), TURN):
        yield Change(added=change.added[start : start + TURN])


def _cut(event: EngineEvent) -> Iterator[EngineEvent]:
    """An event of too many blocks as several that follow each other.

    Tokens that are not exactly those of the blocks stay with none of the parts: cut, the first
    ones would look whole.
    """
    if isinstance(event, AllCleared) or len(event.hashes) < TURN:
        yield event
        return
    for start in range(0, len(event.hashes), TURN - 1):
        end = start + TURN - 1
        part = replace(event, hashes=event.hashes[start:end])
        if isinstance(part, BlocksStored):
            parent = event.hashes[start - 1] if start else part.parent
            size = part.block_tokens
            is_whole = len(part.token_ids) == len(event.hashes) * size
            ids = part.token_ids[start * size : end * size] if is_whole else ()
            part = replace(part, parent=parent, token_ids=ids)
        yield part
