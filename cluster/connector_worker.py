"""The worker half of the connector: one rank's hooks, as vLLM calls them in each step.

Does what the scheduler half decided and reports it; decides nothing. No hook raises and none
waits longer than `IDLE_WAIT_S`: an exception here would end the engine.
"""

import logging
from collections import Counter
from collections.abc import Mapping
from pathlib import Path

import torch

from prefixfleet.cluster.connector_copier import Copier, LoadDone, SaveDone
from prefixfleet.cluster.connector_paged import PagedKv
from prefixfleet.cluster.connector_pool import RankPool
from prefixfleet.cluster.connector_records import Report, Step
from prefixfleet.cluster.connector_session import hello
from prefixfleet.cluster.engine_client import EngineClient
from prefixfleet.kernels.paged import PagedLayout
from prefixfleet.store.namespace import Namespace, in_era
from prefixfleet.store.slot import SlotLayout

log = logging.getLogger(__name__)

IDLE_WAIT_S = 0.002
"""How long a step without work lets the copier run before it looks again: it would spin, and in
one process with the copier it would keep the interpreter from it."""


class WorkerHalf:
    """One rank's copies and what it has to report of them. Owned by the engine's worker."""

    def __init__(self, socket: Path, engine: str) -> None:
        self._socket = socket
        self._engine = engine
        self._era = ""
        self._copier: Copier | None = None
        self._client: EngineClient | None = None
        self._open: Counter[str] = Counter()  # saves by request
        self._finishing: set[str] = set()
        self._bad_blocks: set[int] = set()
        self._report = Report()

    def open(
        self,
        rank: int,
        caches: Mapping[str, torch.Tensor],
        layout: PagedLayout,
        namespace: Namespace,
    ) -> int:
        """Begin to serve the caches of a tensor-parallel rank; returns bytes of one block.

        Raises `ValueError` if nothing can copy blocks of these tensors.
        """
        self._rank = rank
        self._paged = PagedKv(caches, layout, namespace.encoding)
        self._namespace = namespace
        self._start_copier()
        return self._paged.payload_bytes

    def close(self) -> None:
        """End the copier and the connection; what was not copied is lost.

        With the connection the daemon gives the slots away that a save has reserved, so it stays,
        until the process ends, where the copier is in a copy that takes too long.
        """
        if self._copier is None or self._client is None:
            return
        if self._copier.close():
            self._client.close()
        else:
            log.warning("prefixfleet: a copy still writes; its connection ends with the process")

    def begin(self, step: Step) -> None:
        """Before the step is computed: let go of blocks that it may overwrite, start its loads.

        The blocks of a load belong to nobody else, so nothing that is computed from now on can
        touch them; what is still running on a GPU may be their last owner's.
        """
        if step.era != self._era:
            self._start_era(step.era)
        if self._copier is not None:
            self._copier.cancel(step.cancelled)
            if step.loads:
                self._copier.load(step.loads, self._paged.mark())

    def end(self, step: Step) -> None:
        """After the step is computed: start its saves."""
        self._finishing |= step.finishing
        if self._copier is not None and step.saves:
            self._open.update(save.request for save in step.saves)
            self._copier.save(step.saves, self._paged.mark())

    def collect(self, step: Step) -> tuple[set[str], set[str]]:
        """Requests whose saves, and whose loads, are over: each once."""
        if self._copier is None:
            return set(), set()
        if step.idle:
            self._copier.wait(IDLE_WAIT_S)
        loaded, saved = self._copier.take_results()
        self._note_saved(saved)
        for done in loaded:
            self._note_loaded(done)
        sent = {request for request in self._finishing if not self._open[request]}
        self._finishing -= sent
        return sent, {done.load.request for done in loaded}

    def take_bad_blocks(self) -> set[int]:
        """Blocks of failed loads, reported in the step that reports their request."""
        bad, self._bad_blocks = self._bad_blocks, set()
        return bad

    def take_report(self) -> Report | None:
        """What the scheduler half must hear of."""
        report, self._report = self._report, Report()
        return report if report.saves or report.failed_loads or report.load_s else None

    def _note_saved(self, saved: list[SaveDone]) -> None:
        for done in saved:
            self._report.saves[done.save.number] += 1
            self._report.dropped_blocks += done.dropped
            self._open[done.save.request] -= 1
        self._open = +self._open

    def _note_loaded(self, done: LoadDone) -> None:
        self._report.load_s[done.load.request] = done.seconds
        lost = done.load.blocks[done.good :]
        if lost:
            self._report.failed_loads[done.load.request] = done.good
            self._bad_blocks.update(block_id for *_, block_id in lost)

    def _start_era(self, era: str) -> None:
        """Nothing is in flight: the scheduler half refuses a reset otherwise."""
        self.close()
        self._era = era
        self._start_copier()

    def _start_copier(self) -> None:
        namespace = in_era(self._namespace, self._era)
        layout = SlotLayout(
            payload_bytes=self._paged.payload_bytes, shards=namespace.tensor_parallel
        )
        self._client = EngineClient(
            self._socket, hello(self._engine, "worker", self._rank, namespace, layout)
        )
        self._copier = Copier(self._paged, RankPool(self._client, layout, self._rank))
        self._client.start()
        self._copier.start()
