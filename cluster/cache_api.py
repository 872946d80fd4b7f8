"""`PrefixCache`: what every engine's adapter needs of a node's cache, and no more.

An adapter for a fourth engine names blocks (a keyed chain), says how large one is, and calls these
five; the contract is `tests/contracts/test_cache_api.py`. What engines can and cannot do:

- vLLM: `cluster.connector`, which speaks the engine channel itself. Loads asynchronously, pulls by
  the router's plan, keeps salts and adapters apart. Runs here, on CPU.
- SGLang: `cluster.sglang_backend`, a HiCache storage. Loads in the engine's prefetch thread, pulls
  from whom the index names. Checked against the engine's interface; no SGLang engine was run.
- TensorRT-LLM: `cluster.trtllm_connector`, its connector interface. One rank, blocks in this node's
  memory only (no pulls, nothing from its disk: loads and saves hold up the forward pass), no LoRA,
  no images. The interface knows no failed load, so a block is promised once its bytes are proved
  and in the process. Tested in the published order of calls against a description of the
  interface; no TensorRT-LLM was run.
"""

import contextlib
import itertools
import logging
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol

import msgspec

from prefixfleet.cluster.connector_pool import RankPool
from prefixfleet.cluster.engine_channel import join_hashes
from prefixfleet.cluster.engine_client import EngineClient, Welcome
from prefixfleet.store.chain import BlockHash
from prefixfleet.store.errors import ConfigError, CorruptBlock, FleetError, ProtocolError
from prefixfleet.store.records import PullPlan
from prefixfleet.store.slot import SlotLayout

log = logging.getLogger(__name__)

CLOSE_S = 5.0
GRACE_S = 2.0
"""An answer may come so long after the budget of its question."""

Write = Callable[[memoryview], None]
"""Fills a block's payload, which is given to it."""


@dataclass(frozen=True, slots=True)
class Pinned:
    """Leading blocks of a chain that stay in place until the pin's block ends."""

    blocks: tuple[BlockHash, ...]
    slots: tuple[int, ...]
    pulled: int
    failure: str = ""


class PrefixCache(Protocol):
    """One rank's way to the cache of its node. Callable from any thread; nothing raises for a
    cache that is away or wrong: it is a miss."""

    def match(self, chain: Sequence[BlockHash]) -> int:
        """Number of leading blocks that are here now; they may be gone the next moment."""
        ...

    def pin(
        self, request: str, chain: Sequence[BlockHash], plan: PullPlan | None, budget_s: float
    ) -> contextlib.AbstractContextManager[Pinned]:
        """Keep what is here, and what the plan brings within ``budget_s``, until the block ends."""
        ...

    def load(self, pinned: Pinned, position: int, target: memoryview) -> bool:
        """Copy one pinned block's payload, proved. False: compute it, and all after it."""
        ...

    def save(self, parent: BlockHash, writes: Sequence[tuple[BlockHash, Write]]) -> list[bool]:
        """Keep blocks that follow ``parent`` (b"" at the root). False where nothing was kept:
        it is here already, or there is no room. Every rank must offer the same blocks. What a
        write raises comes out, and nothing of this call is kept."""
        ...

    def events(self) -> tuple[int, str]:
        """(number of this connection, reason why there is none): when the number changes, what
        was known of the cache before means nothing."""
        ...


class NodePrefixCache:
    """`PrefixCache` over the engine channel. Owned by the adapter, which closes it."""

    def __init__(
        self, socket: Path, engine: str, namespace: dict[str, Any], layout: SlotLayout, rank: int
    ) -> None:
        hello = {
            "engine": engine,
            "rank": rank,
            "namespace": namespace,
            "payload_bytes": layout.payload_bytes,
            "shards": layout.shards,
        }
        self._asking = EngineClient(socket, {**hello, "role": "scheduler"})
        self._copying = EngineClient(socket, {**hello, "role": "worker"})
        self._names = itertools.count(1)
        self._saving = threading.Lock()  # slots are good until the next reservation
        self._pool = RankPool(self._copying, layout, rank)
        for client in (self._asking, self._copying):
            client.start()

    def welcome(self, timeout_s: float) -> Welcome:
        """What the daemon says of itself. Raises `ConfigError` if there is none, or it refuses."""
        found = self._asking.settle(timeout_s)
        if found is None:
            raise ConfigError(self._asking.refusal or "there is no node daemon at the socket")
        return found

    def close(self) -> None:
        """End both connections: everything that was held is given back.

        A save under way is waited for. Where it takes too long, its connection stays until the
        process ends: the daemon would give away slots that are still written.
        """
        self._asking.close()
        self._pool.close()
        if not self._saving.acquire(timeout=CLOSE_S):
            log.warning("prefixfleet: a save still writes; its connection ends with the process")
            return
        self._copying.close()
        self._saving.release()

    def match(self, chain: Sequence[BlockHash]) -> int:
        """See `PrefixCache`."""
        with self.pin(f"match-{next(self._names)}", chain, None, 0.0) as pinned:
            return len(pinned.blocks)

    @contextlib.contextmanager
    def pin(
        self, request: str, chain: Sequence[BlockHash], plan: PullPlan | None, budget_s: float
    ) -> Iterator[Pinned]:
        """See `PrefixCache`. A request's name is in use by one pin at a time."""
        try:
            yield self._prepare(request, chain, plan, budget_s)
        finally:
            self._asking.ask("release", within_s=GRACE_S, request=request)

    def load(self, pinned: Pinned, position: int, target: memoryview) -> bool:
        """See `PrefixCache`."""
        block = pinned.blocks[position]
        try:
            self._pool.copy_out(pinned.slots[position], block, target)
        except CorruptBlock:
            self._give_back("discard", [block])
            return False
        except FleetError:
            return False
        return True

    def save(self, parent: BlockHash, writes: Sequence[tuple[BlockHash, Write]]) -> list[bool]:
        """See `PrefixCache`."""
        with self._saving:
            return self._save(parent, writes)

    def _save(self, parent: BlockHash, writes: Sequence[tuple[BlockHash, Write]]) -> list[bool]:
        reserved: list[tuple[BlockHash, int]] = []
        try:
            slots = self._pool.reserve(parent, [block for block, _ in writes])
            pairs = zip(writes, slots, strict=True)
            reserved = [(block, slot) for (block, _), slot in pairs if slot >= 0]
            for (_, write), slot in zip(writes, slots, strict=True):
                if slot >= 0:
                    write(self._pool.payload(slot))
            self._pool.commit(reserved)
        except BaseException as error:
            self._give_back("abandon", [block for block, _ in reserved])
            if isinstance(error, FleetError):
                return [False] * len(writes)
            raise
        return [slot >= 0 for slot in slots]

    def _give_back(self, op: Literal["abandon", "discard"], blocks: Sequence[BlockHash]) -> None:
        if blocks:
            with contextlib.suppress(FleetError):  # a connection that ended gave everything back
                self._pool.tell(op, blocks)

    def events(self) -> tuple[int, str]:
        """See `PrefixCache`."""
        welcome = self._asking.welcome
        return (welcome.connection if welcome else 0), self._asking.refusal

    def _prepare(
        self, request: str, chain: Sequence[BlockHash], plan: PullPlan | None, budget_s: float
    ) -> Pinned:
        try:
            answer = self._asking.ask(
                "prepare",
                within_s=budget_s + GRACE_S,
                request=request,
                chain=join_hashes(list(chain)),
                plan=None if plan is None else msgspec.to_builtins(plan),
                budget_s=budget_s,
            ).result(budget_s + 2 * GRACE_S)
            slots = msgspec.convert(answer.get("slots"), tuple[int, ...])
            if len(slots) > len(chain):
                raise ProtocolError(f"{len(slots)} slots for {len(chain)} blocks")
            return Pinned(tuple(chain[: len(slots)]), slots, int(answer.get("pulled", 0)))
        except (FleetError, TimeoutError, msgspec.ValidationError, ValueError) as error:
            return Pinned((), (), 0, f"{type(error).__name__}: {error}")
