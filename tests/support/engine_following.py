"""An engine's follower in a task of its own, and what its changes add up to."""

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing, asynccontextmanager

from prefixfleet.store.chain import BlockHash
from prefixfleet.store.engine_follower import EngineFollower
from prefixfleet.store.engine_mirror import EngineMirror

KEY, BLOCK, ROOT = b"k" * 32, 16, b"r" * 16


def follower_of(events: str, replay: str = "") -> EngineFollower:
    """One that names blocks by these constants."""
    return EngineFollower(EngineMirror(lambda salt: ROOT, BLOCK, KEY), events, replay)


async def hold(follower: EngineFollower, held: set[BlockHash]) -> None:
    """Apply all changes to ``held`` until cancelled, and check that they fit."""
    async with aclosing(follower.changes()) as changes:
        async for change in changes:
            assert held.isdisjoint(change.added), "added twice"
            assert held >= set(change.removed), "removed and never added"
            held.difference_update(change.removed)
            held.update(change.added)


@asynccontextmanager
async def following(
    events: str, replay: str = ""
) -> AsyncGenerator[tuple[EngineFollower, set[BlockHash]], None]:
    """A follower, and the set of blocks that its changes add up to."""
    follower, held = follower_of(events, replay), set[BlockHash]()
    task = asyncio.create_task(hold(follower, held))
    try:
        yield follower, held
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
    assert not task.done() or task.cancelled(), "the follower failed"
    assert held == follower._mirror.held
