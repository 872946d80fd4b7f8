"""The scheduler half of the connector: decides what is loaded and saved, for all ranks.

Lives in vLLM's scheduler loop, so nothing here waits longer than a lookup's `IDLE_WAIT_S`. Must
not touch blocks' bytes. The order of its hooks within one engine step is that of the methods below.
"""

import logging
from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from prefixfleet.cluster.connector_loads import OpenLoads
from prefixfleet.cluster.connector_lookup import TELL_S, Found, Lookup, WaitingLookups
from prefixfleet.cluster.connector_prefix import AdapterDigest, Prefix, read_prefix
from prefixfleet.cluster.connector_records import Handshake, Report, Step
from prefixfleet.cluster.connector_saves import OpenSaves
from prefixfleet.cluster.connector_session import Session
from prefixfleet.store.errors import ConfigError
from prefixfleet.store.namespace import Namespace
from prefixfleet.store.records import PARAMS_KEY
from prefixfleet.store.slot import SlotLayout

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.outputs import KVConnectorOutput
    from vllm.v1.request import Request

log = logging.getLogger(__name__)


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
        self._session = Session(socket, engine, events or {})
        self._adapter_digest = adapter_digest
        self._clock = clock
        self._prefixes: dict[str, Prefix] = {}
        self._lookups = WaitingLookups()
        self._loads = OpenLoads()
        self._saves = OpenSaves()
        self._finishing: set[str] = set()
        self._counts: defaultdict[str, float] = defaultdict(int)

    def open(self, handshakes: Mapping[int, Handshake]) -> None:
        """Connect as the engine that all ranks loaded.

        A daemon that is away is waited for in the background. Raises `ConfigError` if ranks
        differ, or if the daemon refuses this engine.
        """
        first = handshakes[0]
        if any(handshake != first for handshake in handshakes.values()):
            raise ConfigError(f"prefixfleet: tensor-parallel ranks differ: {handshakes}")
        layout = SlotLayout(payload_bytes=first.payload_bytes, shards=len(handshakes))
        self._session.open(msgspec.convert(first.namespace, Namespace), layout)

    def close(self) -> None:
        """End the connection; the daemon frees what it held for this engine."""
        self._session.close()

    # one engine step: arrivals, lookups of waiting requests, then the step itself

    def arrived(self, request: "Request") -> None:
        """Start the lookup, so that a pull overlaps the queue."""
        prefix = read_prefix(request, self._session.namespace.block_tokens, self._adapter_digest)
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
        lookup = self._lookups.of(request.request_id)
        if lookup is None or prefix.first >= len(lookup.chain):
            return 0
        found = self._lookups.poll(lookup)
        if found is None:
            return None
        prefix.note_found(found)
        if not prefix.is_named_rightly():
            return 0
        return max(0, len(found.slots) - prefix.first) * prefix.block_tokens

    def allocated(self, request: "Request", block_ids: list[int], external: int) -> None:
        """The engine took ``external`` tokens of what `match` said, or none."""
        prefix = self._prefixes.get(request.request_id)
        if prefix is None:
            return
        if external == 0:
            self._lookups.release(request.request_id)
            return
        lookup = self._lookups.of(request.request_id)
        assert lookup is not None  # `match` said what it found
        chosen = range(prefix.first, prefix.first + external // prefix.block_tokens)
        self._loads.begin(request.request_id, lookup, chosen, block_ids)

    def build(self, output: "SchedulerOutput") -> Step:
        """What the workers do in this step."""
        for request_id in output.preempted_req_ids or ():
            self._preempted(request_id)
        for request_id, scheduled in output.num_scheduled_tokens.items():
            if (prefix := self._prefixes.get(request_id)) is not None:
                computed = prefix.request.num_computed_tokens + scheduled
                if full := self._unsaved(prefix, computed):
                    block_ids = output.kv_connector_block_state.get_block_ids(request_id)[0]
                    self._save(prefix, full, block_ids)
        idle = output.total_num_scheduled_tokens == 0
        self._lookups.next_step(idle=idle)
        return self._take_step(idle=idle)

    def update(self, output: "KVConnectorOutput") -> None:
        """What the workers did."""
        report = output.kv_connector_worker_meta or Report()
        self._loads.note_failed(report.failed_loads)
        self._counts["dropped_blocks"] += report.dropped_blocks
        self._loads.note_seconds(report.load_s)
        self._saves.note_done(report.saves)
        for request_id in output.finished_recving or ():
            self._loaded(request_id)

    def finished(
        self, request: "Request", block_ids: list[int]
    ) -> tuple[bool, dict[str, Any] | None]:
        """The request is over, also by abort: whether its blocks wait for their saves, and what
        its response tells the router."""
        request_id = request.request_id
        prefix = self._prefixes.pop(request_id, None)
        if prefix is None:
            return False, None
        is_loading = request_id in self._loads
        if not is_loading:  # else the pins are needed until the copiers are done
            self._lookups.release(request_id)
            self._save_last(prefix, block_ids)
        outcome = asdict(prefix.outcome())
        self._session.client.ask("outcome", within_s=TELL_S, outcome=outcome)
        # the engine itself keeps the blocks of a load, and must not be told of them twice
        waits = not is_loading and self._saves.holds(request_id)
        if waits:
            self._finishing.add(request_id)
        return waits, {PARAMS_KEY: outcome}

    def take_counts(self) -> dict[str, float]:
        """What happened since the last call, by names of `connector_metrics.COUNTERS`."""
        counts, self._counts = self._counts, defaultdict(int)
        counts["daemon_losses"] = self._session.take_losses()
        return {name: count for name, count in counts.items() if count}

    @property
    def is_busy(self) -> bool:
        """Whether the engine must go on stepping for the copiers' sake."""
        return bool(self._saves or self._loads)

    def reset(self) -> bool:
        """Forget everything: later blocks belong to a namespace of their own, since weights may
        have changed. False while blocks are on their way."""
        if self.is_busy:
            return False
        self._session.reset()
        self._lookups.forget()
        log.warning("prefixfleet: caches reset; this engine shares no blocks with others any more")
        return True

    def _look_up(self, prefix: Prefix) -> None:
        request = prefix.request
        self._lookups.release(request.request_id)
        welcome = self._session.client.welcome
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
        lookup = Lookup(self._session.client, name, chain, plan, self._clock)
        self._lookups.start(request.request_id, lookup)

    def _unsaved(self, prefix: Prefix, computed: int) -> int:
        """Number of leading blocks that are full and known, if some of them are not in the pool.

        A block is known when its tokens are: with asynchronous scheduling the engine computes
        ahead of what it has told the scheduler.
        """
        if (welcome := self._session.client.welcome) is None:
            return 0
        prefix.extend(welcome)
        full = min(computed // prefix.block_tokens, len(prefix.chain))
        return full if full > prefix.saved and prefix.is_named_rightly() else 0

    def _save(self, prefix: Prefix, full: int, block_ids: list[int]) -> None:
        self._counts["saved_blocks"] += self._saves.begin(
            prefix, full, block_ids, self._session.layout.shards
        )

    def _save_last(self, prefix: Prefix, block_ids: list[int]) -> None:
        """Save what asynchronous scheduling made known since the last step; count what is lost."""
        request = prefix.request
        computed = request.num_computed_tokens - request.num_in_flight_tokens
        if full := self._unsaved(prefix, min(computed, len(block_ids) * prefix.block_tokens)):
            self._save(prefix, full, block_ids)
            self._counts["dropped_blocks"] += full - prefix.saved

    def _preempted(self, request_id: str) -> None:
        """The engine took the request's blocks away."""
        self._saves.cancel(request_id)
        if (prefix := self._prefixes.get(request_id)) is not None:
            prefix.saved = 0

    def _loaded(self, request_id: str) -> None:
        loaded = self._loads.end(request_id)
        self._lookups.release(request_id, loaded.good, loaded.seconds)
        self._counts["loaded_blocks"] += loaded.good
        self._counts["load_seconds"] += loaded.seconds
        self._counts["failed_loads"] += loaded.good < loaded.wanted
        if (prefix := self._prefixes.get(request_id)) is not None:  # else aborted meanwhile
            prefix.note_loaded(loaded.good, loaded.wanted)

    def _take_step(self, *, idle: bool) -> Step:
        saves, cancelled = self._saves.take_new()
        step = Step(
            loads=self._loads.take_new(),
            saves=saves,
            cancelled=cancelled,
            finishing=frozenset(self._finishing),
            idle=idle,
            era=self._session.era,
        )
        self._finishing = set()
        return step
