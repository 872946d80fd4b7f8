"""What static engines hold, by their own KV events: a view beside that of the index.

Kept apart from the index's view: nobody can pull from these engines, and a reload of the index
must not touch them.
"""

import asyncio
import logging
import ssl
from collections.abc import Callable, Mapping
from contextlib import aclosing
from dataclasses import asdict, dataclass
from typing import Any

from prefixfleet.router.adapters import by_name
from prefixfleet.router.degraded import Degraded
from prefixfleet.router.engine_poll import Claim, EnginePoller
from prefixfleet.router.static_workers import StaticWorker
from prefixfleet.router.view import View
from prefixfleet.store.engine_follower import EngineFollower
from prefixfleet.store.engine_mirror import Change, EngineMirror
from prefixfleet.store.following import numbers_of
from prefixfleet.store.index import IndexEvent, Membership
from prefixfleet.store.namespace import Scope, chain_root, hash_key

SILENT_PROMPTS = 20
"""Prompts of a block and more after which an engine that told nothing is not believed to."""
RESTART_S = 10.0
"""After a fault of ours in following an engine, until it is tried again."""

_REMEDIES = {
    EnginePoller: "poll each engine from one place only; raise event_buffer_max_size of its "
    "kv_cache_config, and see that its server answers",
    EngineFollower: "give the engine less KV memory, or larger blocks, here and in its entry; "
    "it ends when half of that is free",
}

log = logging.getLogger(__name__)


@dataclass(slots=True, eq=False)
class _Followed:
    entry: StaticWorker
    member: Membership
    mirror: EngineMirror
    follower: EngineFollower | EnginePoller
    task: asyncio.Task[None]
    prompts: int = 0

    @property
    def elsewhere(self) -> bool:
        """Whether another router of the fleet hears its events, which are told once."""
        return isinstance(self.follower, EnginePoller) and self.follower.elsewhere


class EngineFeed:
    """Owned by the router's event loop. `follow` says whom to follow; `close` ends it. ``tls`` is
    for engines that are polled over https."""

    def __init__(
        self,
        secret: bytes,
        degraded: Degraded,
        clock: Callable[[], float],
        claim: Claim | None = None,
        tls: ssl.SSLContext | None = None,
    ) -> None:
        self.view = View(clock)
        self._secret = secret
        self._key = hash_key(secret)
        self._degraded = degraded
        self._claim = claim
        self._tls = tls
        self._followed: dict[str, _Followed] = {}
        self._lives = 0

    def follow(self, entries: Mapping[str, StaticWorker]) -> None:
        """Follow exactly those of ``entries`` that publish events."""
        for name, followed in list(self._followed.items()):
            if entries.get(name) != followed.entry:
                self._stop(name)
        for name, entry in entries.items():
            if entry.events and name not in self._followed:
                self._start(entry)

    async def close(self) -> None:
        """Follow nobody any more."""
        tasks = [followed.task for followed in self._followed.values()]
        for name in list(self._followed):
            self._stop(name)
        await asyncio.gather(*tasks, return_exceptions=True)

    def numbers(self) -> dict[str, dict[str, Any]]:
        """Blocks held, what is known of them and what was lost, by worker; and whether another
        router of the fleet follows it, so that nothing is known of it here.
        """
        return {
            n: numbers_of(one.follower, one.mirror) | {"followed_by_another_router": one.elsewhere}
            for n, one in self._followed.items()
        }

    def losses(self) -> dict[str, dict[str, int]]:
        """What went wrong, counted by kind, by worker."""
        return {name: asdict(one.follower.losses) for name, one in self._followed.items()}

    def note_prompt(self, name: str, blocks: int) -> None:
        """A prompt of ``blocks`` full blocks was computed by worker ``name``: it should say so."""
        followed = self._followed.get(name)
        if followed is None or not blocks or followed.follower.batches or followed.elsewhere:
            return
        followed.prompts += 1
        if followed.prompts >= SILENT_PROMPTS:
            self._degraded.enter(
                f"events of {name}",
                f"no KV event from {followed.entry.events} after {followed.prompts} prompts",
                "start the engine with KV events, and check 'events' in its entry",
            )

    def _start(self, entry: StaticWorker) -> None:
        digest = entry.namespace().digest(self._secret)
        mirror = EngineMirror(
            lambda salt: chain_root(digest, Scope(salt=salt), self._key),
            entry.block_tokens,
            self._key,
            lambda name, salt: chain_root(digest, Scope(lora=by_name(name), salt=salt), self._key),
        )
        self._lives += 1
        member = Membership(entry.node, self._lives, 0)
        follower = (
            EnginePoller(mirror, entry.events, entry.block_tokens, self._claim, self._tls)
            if entry.engine == "trtllm"
            else EngineFollower(mirror, entry.events, entry.replay)
        )
        self.view.apply(IndexEvent("join", member))
        followed = _Followed(
            entry, member, mirror, follower, asyncio.create_task(self._run(entry.name))
        )
        self._followed[entry.name] = followed

    def _stop(self, name: str) -> None:
        followed = self._followed.pop(name)
        followed.task.cancel()
        self.view.apply(IndexEvent("leave", followed.member))
        self._degraded.end(f"events of {name}")

    async def _run(self, name: str) -> None:
        await asyncio.sleep(0)  # until it is listed
        followed = self._followed[name]
        while True:
            try:
                async with aclosing(followed.follower.changes()) as changes:
                    async for change in changes:
                        self._apply(followed, change)
            except Exception as error:  # the top of a task: its fault must be seen
                log.exception("events of %s: a fault of the router", name)
                self._empty(followed)
                self._degraded.enter(
                    f"events of {name}",
                    f"the router failed to follow them: {type(error).__name__}: {error}",
                    "report it; the worker is routed by load, and followed anew after a while",
                )
            await asyncio.sleep(RESTART_S)

    def _empty(self, followed: _Followed) -> None:
        """Believe nothing of what it holds: view and mirror may differ."""
        followed.follower.forget()
        for kind in ("leave", "join"):
            self.view.apply(IndexEvent(kind, followed.member))

    def _apply(self, followed: _Followed, change: Change) -> None:
        mode = f"events of {followed.entry.name}"
        if followed.elsewhere:
            followed.prompts = 0  # its silence says nothing
        if change.removed:
            self.view.apply(IndexEvent("withdraw", followed.member, change.removed))
        if change.added:
            self.view.apply(IndexEvent("publish", followed.member, change.added))
        if theirs := followed.mirror.other_block_tokens:
            self._degraded.enter(
                mode,
                f"blocks of {theirs} tokens, block_tokens says {followed.entry.block_tokens}: "
                "they match nothing",
                f"set block_tokens to {theirs} in the worker's entry",
            )
        elif fault := followed.follower.fault:
            self._degraded.enter(mode, fault, _REMEDIES[type(followed.follower)])
        elif followed.prompts < SILENT_PROMPTS or followed.follower.batches:
            self._degraded.end(mode)
