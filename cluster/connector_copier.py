"""The thread of an engine rank that copies blocks: loads first, then saves.

Must not know vLLM or requests' prompts. Nothing raised here reaches the engine: a load that
fails is reported with the blocks that did arrive, a save that fails is dropped.
"""

import logging
import threading
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple

from prefixfleet.cluster.connector_paged import BATCH_BLOCKS, PagedKv
from prefixfleet.cluster.connector_pool import RankPool
from prefixfleet.cluster.connector_records import Load, Save
from prefixfleet.cluster.connector_staging import Moment
from prefixfleet.store.chain import BlockHash
from prefixfleet.store.errors import CorruptBlock, FleetError, PeerLost

log = logging.getLogger(__name__)

CLOSE_S = 5.0


@dataclass(frozen=True, slots=True)
class LoadDone:
    """A load is over; ``good`` leading blocks of it arrived, in ``seconds`` of copying."""

    load: Load
    good: int
    seconds: float


@dataclass(frozen=True, slots=True)
class SaveDone:
    """A save is over; its last ``dropped`` blocks could not be saved."""

    save: Save
    dropped: int


class _LoadJob(NamedTuple):
    load: Load
    after: Moment | None  # what may still use the blocks as others' is done


class _SaveJob(NamedTuple):
    save: Save
    after: Moment | None  # the forward that filled the blocks is done


class Copier:
    """Copies between one rank's paged KV and the node's pool.

    Owns a thread, which alone uses ``paged`` and ``pool``. Queues and results are guarded by one
    lock; the other methods are called from the engine's thread and return at once, except `wait`
    and `close`.
    """

    def __init__(self, paged: PagedKv, pool: RankPool) -> None:
        self._paged = paged
        self._pool = pool
        self._row_views = [row.numpy().data for row in paged.rows]
        self._thread = threading.Thread(target=self._run, name="prefixfleet-copier", daemon=True)
        self._changed = threading.Condition()
        self._loads: deque[_LoadJob] = deque()
        self._saves: deque[_SaveJob] = deque()
        self._open_loads = 0
        self._open_saves: set[int] = set()
        self._cancelled: set[int] = set()
        self._loaded: list[LoadDone] = []
        self._saved: list[SaveDone] = []
        self._closing = False
        self._said_unstorable = False  # of the thread

    def start(self) -> None:
        """Begin to copy what is queued."""
        self._thread.start()

    def close(self) -> bool:
        """Stop after the batch in hand; queued jobs are dropped. Whether it has stopped: until it
        has, it may write into slots of the pool.
        """
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        if self._thread.is_alive():
            self._thread.join(CLOSE_S)
        return not self._thread.is_alive()

    def load(self, loads: Sequence[Load], after: Moment | None) -> None:
        """Queue loads into blocks that nothing uses which the engine launches after ``after``."""
        with self._changed:
            self._loads.extend(_LoadJob(load, after) for load in loads)
            self._open_loads += len(loads)
            self._changed.notify_all()

    def save(self, saves: Sequence[Save], after: Moment | None) -> None:
        """Queue saves; ``after`` is the forward that filled their blocks."""
        with self._changed:
            self._saves.extend(_SaveJob(save, after) for save in saves)
            self._open_saves.update(save.number for save in saves)
            self._changed.notify_all()

    def cancel(self, numbers: frozenset[int]) -> None:
        """The engine may overwrite these saves' blocks when this returns.

        It does not wait for one that is being read: what was read is thrown away.
        """
        with self._changed:
            self._cancelled |= numbers & self._open_saves

    def take_results(self) -> tuple[list[LoadDone], list[SaveDone]]:
        """Loads and saves that are over since the last call, each exactly once."""
        with self._changed:
            loaded, self._loaded = self._loaded, []
            saved, self._saved = self._saved, []
            return loaded, saved

    def wait(self, timeout_s: float) -> None:
        """Let the thread work until a job is over; at once if none is open."""
        with self._changed:
            self._changed.wait_for(self._has_news, timeout_s)

    def _has_news(self) -> bool:
        is_open = self._open_loads or self._open_saves
        return bool(self._loaded or self._saved or not is_open or self._closing)

    def _run(self) -> None:
        while (job := self._next()) is not None:
            if isinstance(job, _LoadJob):
                began = time.monotonic()
                self._end_load(LoadDone(job.load, self._load(job), time.monotonic() - began))
            else:
                self._end_batch(job, kept=self._save_batch(job))
        self._pool.close()

    def _next(self) -> _LoadJob | _SaveJob | None:
        with self._changed:
            self._changed.wait_for(lambda: self._loads or self._saves or self._closing)
            if self._closing:
                return None
            return self._loads.popleft() if self._loads else self._saves.popleft()

    def _load(self, job: _LoadJob) -> int:
        """Number of leading blocks that arrived."""
        good, blocks = 0, job.load.blocks
        try:
            for start in range(0, len(blocks), BATCH_BLOCKS):
                batch = blocks[start : start + BATCH_BLOCKS]
                staged = self._stage(batch)
                self._paged.write([block_id for *_, block_id in batch[:staged]], job.after)
                good += staged
                if staged < len(batch):
                    break
        except Exception:  # the engine waits for this load; it must hear of its end
            log.exception("prefixfleet: load failed after %d blocks", good)
        return good

    def _stage(self, batch: Sequence[tuple[int, BlockHash, int]]) -> int:
        """Copy slots to the paged KV's rows, proved; the number of leading ones that could be."""
        for i, (slot, block, _) in enumerate(batch):
            try:
                self._pool.copy_out(slot, block, self._row_views[i])
                self._paged.send(i)
            except FleetError as error:
                _log(error, "a block is not loaded but computed")
                if isinstance(error, CorruptBlock):
                    self._give_back("discard", [block])
                return i
        return len(batch)

    def _save_batch(self, job: _SaveJob) -> int:
        """Copy the first blocks of a save; how many are in the pool, or need not be.

        Fewer than a batch: the rest is not worth trying.
        """
        batch = job.save.blocks[:BATCH_BLOCKS]
        blocks = [block for block, _ in batch]
        written: list[tuple[BlockHash, int, int]] = []
        try:
            slots = self._pool.reserve(job.save.parent, blocks)
            written = [(b, slot, i) for (b, i), slot in zip(batch, slots, strict=True) if slot >= 0]
            lost = self._write_slots(job, written) if written else []
            return blocks.index(lost[0]) if lost else len(batch)
        except FleetError as error:
            _log(error, f"{len(job.save.blocks)} blocks are not saved")
        except Exception:  # the engine waits for this save; it must hear of its end
            log.exception("prefixfleet: save failed")
        if written:
            self._give_back("abandon", [block for block, *_ in written])
        return 0

    def _write_slots(
        self, job: _SaveJob, written: list[tuple[BlockHash, int, int]]
    ) -> list[BlockHash]:
        """Those of ``written``, its last ones, that are not in the pool after all."""
        targets = [self._pool.payload(slot) for _, slot, _ in written]
        self._paged.read([block_id for *_, block_id in written], targets, job.after)
        with self._changed:
            cancelled = job.save.number in self._cancelled
        # cancelled: the engine may have written into what was read
        good = 0 if cancelled else self._leading_storable(targets)
        if good:
            self._pool.commit([(block, slot) for block, slot, _ in written[:good]])
        if lost := [block for block, *_ in written[good:]]:
            self._give_back("abandon", lost)
        return lost

    def _leading_storable(self, payloads: Sequence[memoryview]) -> int:
        wrong = (i for i, p in enumerate(payloads) if not self._paged.is_storable(p))
        good = next(wrong, len(payloads))
        if good < len(payloads):
            level = logging.DEBUG if self._said_unstorable else logging.WARNING
            self._said_unstorable = True
            log.log(level, "prefixfleet: a block has values that 8 bits cannot hold; not saved")
        return good

    def _give_back(self, op: Literal["abandon", "discard"], blocks: Sequence[BlockHash]) -> None:
        try:
            self._pool.tell(op, blocks)
        except FleetError as error:  # a connection that ended gave everything back
            _log(error, f"{op} is not told to the node daemon")

    def _end_load(self, done: LoadDone) -> None:
        with self._changed:
            self._loaded.append(done)
            self._open_loads -= 1
            self._changed.notify_all()

    def _end_batch(self, job: _SaveJob, *, kept: int) -> None:
        """Put the rest of a save back in front, or report that the save is over."""
        save, rest = job.save, job.save.blocks[kept:]
        with self._changed:
            if kept == BATCH_BLOCKS and rest and save.number not in self._cancelled:
                parent = save.blocks[kept - 1][0]
                self._saves.appendleft(job._replace(save=replace(save, parent=parent, blocks=rest)))
                return
            self._open_saves.discard(save.number)
            self._cancelled.discard(save.number)
            self._saved.append(SaveDone(save, len(rest)))
            self._changed.notify_all()


def _log(error: FleetError, what: str) -> None:
    # the channel has logged once that the daemon is away
    level = logging.DEBUG if isinstance(error, PeerLost) else logging.WARNING
    log.log(level, "prefixfleet: %s: %s", what, error)
