"""The scheduler half of the connector: decides what is loaded and saved, for all ranks.

Lives in vLLM's scheduler loop, so nothing here waits longer than `IDLE_WAIT_S`. Must not touch
blocks' bytes. The order of its hooks within one engine step is that of the methods below.
"""

import itertools
import logging
import uuid
from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from prefixfleet.cluster.connector_lookup import TELL_S, Found, Lookup
from prefixfleet.cluster.connector_prefix import AdapterDigest, Prefix, read_prefix
from prefixfleet.cluster.connector_records import Handshake, Load, Report, Save, Step
from prefixfleet.cluster.connector_worker import hello, in_era
from prefixfleet.cluster.engine_client import EngineClient
from prefixfleet.store.errors import ConfigError
from prefixfleet.store.namespace import Namespace
from prefixfleet.store.records import PARAMS_KEY
from prefixfleet.store.slot import SlotLayout

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.outputs import KVConnectorOutput
    from vllm.v1.request import Request

log = logging.getLogger(__name__)

SETTLE_S = 5.0
"""How long the engine's start waits for the daemon's first answer."""
IDLE_WAIT_S = 0.001
"""Once a step, when the engine has nothing else to do than wait for a lookup."""
MAX_OPEN_BLOCKS = 4096
"""Blocks handed to the copiers and not done; more wait in their requests, or are dropped."""


@dataclass(slots=True)
class _OpenSave:
    save: Save
    ranks: int  # that are not done
    cancelled: bool = False


class SchedulerHalf:
    """Owned by vLLM's scheduler, in its thread."""

    def __init__(
        self,
        socket: Path,
        engine: str,
        adapter_digest: AdapterDigest,
        clock: Callable[[], float],
        events: Mapping[str, str] | None = None,
    ) -> None:
        """``events`` says where the engine tells of its own cache: fields of the hello."""
        self._socket = socket
        self._events = events or {}
        self._engine = engine
        self._adapter_digest = adapter_digest
        self._clock = clock
        self._client = EngineClient(socket, {})  # until `open`: no daemon
        self._prefixes: dict[str, Prefix] = {}
        self._lookups: dict[str, Lookup] = {}
        self._loading: dict[str, Load] = {}
        self._failed: dict[str, int] = {}  # blocks that arrived, of loads that failed
        self._open: dict[int, _OpenSave] = {}
        self._numbers = itertools.count()
        self._era = ""
        self._idle = True
        self._waited = False
        self._new_loads: list[Load] = []
        self._new_saves: list[Save] = []
        self._cancelled: set[int] = set()
        self._finishing: set[str] = set()
        self._counts: defaultdict[str, float] = defaultdict(int)
        self._losses = 0  # of the daemon, counted so far

    def open(self, handshakes: Mapping[int, Handshake]) -> None:
        """Connect as the engine that all ranks loaded.

        A daemon that is away is waited for in the background. Raises `ConfigError` if ranks
        differ, or if the daemon refuses this engine.
        """
        first = handshakes[0]
        if any(handshake != first for handshake in handshakes.values()):
            raise ConfigError(f"prefixfleet: tensor-parallel ranks differ: {handshakes}")
        self._namespace = msgspec.convert(first.namespace, Namespace)
        self._layout = SlotLayout(payload_bytes=first.payload_bytes, shards=len(handshakes))
        self._connect()
        if self._client.settle(SETTLE_S) is None and self._client.refusal:
            refusal = self._client.refusal
            self.close()
            raise ConfigError(f"prefixfleet: the node daemon refuses this engine: {refusal}")

    def close(self) -> None:
        """End the connection; the daemon frees what it held for this engine."""
        self._client.close()

    # one engine step: arrivals, lookups of waiting requests, then the step itself

    def arrived(self, request: "Request") -> None:
        """Start the lookup, so that a pull overlaps the queue."""
        prefix = read_prefix(request, self._namespace.block_tokens, self._adapter_digest)
        if prefix is not None:
            self._prefixes[request.request_id] = prefix
            self._look_up(prefix)

    def match(self, request: "Request", computed: int) -> int | None:
        """Tokens after the first ``computed`` that can be loaded; None while that is not known."""
        prefix = self._prefixes.get(request.request_id)
        if prefix is None or prefix.load_failed:
            return 0
        if prefix.attempt != request.num_preemptions:
            prefix.attempt = request.num_preemptions
            self._look_up(prefix)
        prefix.note_match(computed // prefix.block_tokens)
        lookup = self._lookups.get(request.request_id)
        if lookup is None or prefix.first >= len(lookup.chain):
            return 0
        found = self._poll(lookup)
        if found is None:
            return None
        prefix.note_found(found)
        return max(0, len(found.slots) - prefix.first) * prefix.block_tokens

    def allocated(self, request: "Request", block_ids: list[int], external: int) -> None:
        """The engine took ``external`` tokens of what `match` said, or none."""
        prefix = self._prefixes.get(request.request_id)
        if prefix is None:
            return
        if external == 0:
            self._release(request.request_id)
            return
        lookup = self._lookups[request.request_id]
        found = lookup.poll()
        assert found is not None
        chosen = range(prefix.first, prefix.first + external // prefix.block_tokens)
        blocks = tuple((found.slots[i], lookup.chain[i], block_ids[i]) for i in chosen)
        load = Load(request.request_id, blocks)
        self._loading[request.request_id] = load
        self._new_loads.append(load)

    def build(self, output: "SchedulerOutput") -> Step:
        """What the workers do in this step."""
        for request_id in output.preempted_req_ids or ():
            self._cancel_saves(request_id)
        for request_id, scheduled in output.num_scheduled_tokens.items():
            if (prefix := self._prefixes.get(request_id)) is not None:
                computed = prefix.request.num_computed_tokens + scheduled
                if full := self._unsaved(prefix, computed):
                    block_ids = output.kv_connector_block_state.get_block_ids(request_id)[0]
                    self._save(prefix, full, block_ids)
        self._idle = output.total_num_scheduled_tokens == 0
        self._waited = False
        return self._take_step()

    def update(self, output: "KVConnectorOutput") -> None:
        """What the workers did."""
        report = output.kv_connector_worker_meta or Report()
        self._failed.update(report.failed_loads)
        self._counts["dropped_blocks"] += report.dropped_blocks
        self._counts["load_seconds"] += report.load_s
        for number, ranks in report.saves.items():
            self._open[number].ranks -= ranks
            if self._open[number].ranks == 0:
                del self._open[number]
        for request_id in output.finished_recving or ():
            self._loaded(self._loading.pop(request_id))

    def finished(
        self, request: "Request", block_ids: list[int]
    ) -> tuple[bool, dict[str, Any] | None]:
        """The request is over, also by abort: whether its blocks wait for their saves, and what
        its response tells the router."""
        request_id = request.request_id
        prefix = self._prefixes.pop(request_id, None)
        if prefix is None:
            return False, None
        is_loading = request_id in self._loading
        if not is_loading:  # else the pins are needed until the copiers are done
            self._release(request_id)
            self._save_last(prefix, block_ids)
        outcome = asdict(prefix.outcome())
        self._client.ask("outcome", within_s=TELL_S, outcome=outcome)
        # the engine itself keeps the blocks of a load, and must not be told of them twice
        waits = not is_loading and any(
            o.save.request == request_id and not o.cancelled for o in self._open.values()
        )
        if waits:
            self._finishing.add(request_id)
        return waits, {PARAMS_KEY: outcome}

    def take_counts(self) -> dict[str, float]:
        """What happened since the last call, by names of `connector_metrics.COUNTERS`."""
        losses, self._losses = self._client.losses - self._losses, self._client.losses
        counts, self._counts = self._counts, defaultdict(int)
        counts["daemon_losses"] = losses
        return {name: count for name, count in counts.items() if count}

    @property
    def is_busy(self) -> bool:
        """Whether the engine must go on stepping for the copiers' sake."""
        return bool(self._open or self._loading)

    def reset(self) -> bool:
        """Forget everything: later blocks belong to a namespace of their own, since weights may
        have changed. False while blocks are on their way."""
        if self.is_busy:
            return False
        self._era = uuid.uuid4().hex
        self._client.close()
        self._lookups.clear()
        self._losses = 0
        self._connect()
        log.warning("prefixfleet: caches reset; this engine shares no blocks with others any more")
        return True

    def _connect(self) -> None:
        namespace = in_era(self._namespace, self._era)
        known = hello(self._engine, "scheduler", 0, namespace, self._layout)
        fields = {**known, **self._events}
        self._client = EngineClient(self._socket, fields)
        self._client.start()

    def _look_up(self, prefix: Prefix) -> None:
        request = prefix.request
        self._release(request.request_id)
        welcome = self._client.welcome
        if welcome is None:
            prefix.found = Found(failure="daemon_lost")
            self._counts["requests_without_daemon"] += 1
            return
        prefix.extend(welcome)
        chain = prefix.loadable()
        if not chain or request.skip_reading_prefix_cache:
            return
        again = f"#{prefix.attempt}" if prefix.attempt else ""
        plan = None if again else prefix.plan
        name = f"{request.request_id}{again}"
        self._lookups[request.request_id] = Lookup(self._client, name, chain, plan, self._clock)

    def _poll(self, lookup: Lookup) -> Found | None:
        found = lookup.poll()
        if found is None and self._idle and not self._waited:
            self._waited = True
            found = lookup.poll(IDLE_WAIT_S)
        return found

    def _release(self, request_id: str) -> None:
        if (lookup := self._lookups.pop(request_id, None)) is not None:
            lookup.release()

    def _unsaved(self, prefix: Prefix, computed: int) -> int:
        """Number of leading blocks that are full and known, if some of them are not in the pool.

        A block is known when its tokens are: with asynchronous scheduling the engine computes
        ahead of what it has told the scheduler.
        """
        if (welcome := self._client.welcome) is None:
            return 0
        prefix.extend(welcome)
        full = min(computed // prefix.block_tokens, len(prefix.chain))
        return full if full > prefix.saved else 0

    def _save(self, prefix: Prefix, full: int, block_ids: list[int]) -> None:
        """Hand blocks to the copiers; with too many in hand they stay with the request."""
        first = prefix.saved
        if full - first + sum(len(o.save.blocks) for o in self._open.values()) > MAX_OPEN_BLOCKS:
            return
        blocks = tuple(zip(prefix.chain[first:full], block_ids[first:full], strict=True))
        number = next(self._numbers)
        save = Save(number, prefix.request.request_id, prefix.parent_of(first), blocks)
        prefix.saved = full
        self._counts["saved_blocks"] += len(blocks)
        self._open[number] = _OpenSave(save, self._layout.shards)
        self._new_saves.append(save)

    def _save_last(self, prefix: Prefix, block_ids: list[int]) -> None:
        """Save what asynchronous scheduling made known since the last step; count what is lost."""
        request = prefix.request
        computed = request.num_computed_tokens - request.num_in_flight_tokens
        if full := self._unsaved(prefix, min(computed, len(block_ids) * prefix.block_tokens)):
            self._save(prefix, full, block_ids)
            self._counts["dropped_blocks"] += full - prefix.saved

    def _cancel_saves(self, request_id: str) -> None:
        """The engine took the request's blocks away and may overwrite them in this step."""
        for number, open_save in self._open.items():
            if open_save.save.request == request_id and not open_save.cancelled:
                open_save.cancelled = True
                self._cancelled.add(number)
        if (prefix := self._prefixes.get(request_id)) is not None:
            prefix.saved = 0

    def _loaded(self, load: Load) -> None:
        self._release(load.request)
        wanted = len(load.blocks)
        good = self._failed.pop(load.request, wanted)
        self._counts["loaded_blocks"] += good
        self._counts["failed_loads"] += good < wanted
        if (prefix := self._prefixes.get(load.request)) is not None:  # else aborted meanwhile
            prefix.note_loaded(good, wanted)

    def _take_step(self) -> Step:
        step = Step(
            loads=tuple(self._new_loads),
            saves=tuple(self._new_saves),
            cancelled=frozenset(self._cancelled),
            finishing=frozenset(self._finishing),
            idle=self._idle,
            era=self._era,
        )
        self._new_loads, self._new_saves = [], []
        self._cancelled, self._finishing = set(), set()
        return step
