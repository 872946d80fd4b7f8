"""TensorRT-LLM's KV blocks as blocks of the node's cache. Must not import TensorRT-LLM; the
classes that it loads are in `trtllm_connector`.

Its connector interface has no way to say that a load failed, and never computes what was promised.
So a block is promised only when its bytes have been read from the pool and proved, and are in this
process; the load itself is then a copy that cannot miss. This needs scheduler and worker in one
process: one rank.
"""

import itertools
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

import torch

from prefixfleet.cluster.cache_api import PrefixCache, Write
from prefixfleet.store.chain import BlockHash, extend_chain
from prefixfleet.store.errors import ConfigError

STAGED_BYTES = 1 << 30
"""Promised and not loaded yet; a request beyond it is computed."""
MAX_REQUESTS = 16_384
"""Known at a time; beyond it the oldest is forgotten, and its blocks are kept no more."""
DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float8_e4m3fn)
"""KV that has its scales elsewhere (NVFP4) would be half of a block."""

T = TypeVar("T")


@dataclass(slots=True)
class _Request:
    """One request so far. ``staged`` are the bytes of blocks from ``first`` on, until loaded."""

    root: BlockHash
    token_ids: list[int] = field(default_factory=list)
    block_ids: list[int] = field(default_factory=list)
    chain: list[BlockHash] = field(default_factory=list)
    staged: list[bytearray] = field(default_factory=list)
    first: int = 0
    kept: int = 0  # leading blocks that were offered to the cache


@dataclass(frozen=True, slots=True)
class Step:
    """What the worker does in one forward pass. Made by the scheduler; pickles.

    ``loads`` are (block id, bytes); ``saves`` (parent, [(block, block id), ...]).
    """

    loads: tuple[tuple[int, bytearray], ...] = ()
    saves: tuple[tuple[BlockHash, tuple[tuple[BlockHash, int], ...]], ...] = ()


class Promises:
    """The scheduler's part: what is promised to which request, and what follows from a step.

    Owned by the scheduler; one thread. ``key`` and ``cache`` are of the node's daemon.
    """

    def __init__(self, cache: PrefixCache, key: bytes, block_tokens: int, block_bytes: int) -> None:
        self._cache = cache
        self._key = key
        self._block_tokens = block_tokens
        self._block_bytes = block_bytes
        self._requests: OrderedDict[int, _Request] = OrderedDict()
        self._staged_bytes = 0
        self._names = itertools.count(1)

    @property
    def staged_bytes(self) -> int:
        """Bytes that are promised and not loaded yet."""
        return self._staged_bytes

    def promise(
        self, request: int, root: BlockHash, token_ids: Sequence[int], computed: int
    ) -> int:
        """Tokens behind the first ``computed`` that will be loaded; whole blocks, never the last
        token, nothing where the engine reuses a part of a block."""
        self.forget(request)
        if not self._make_room():
            return 0
        asked = self._requests[request] = _Request(root)
        if computed % self._block_tokens:
            return 0
        asked.first = computed // self._block_tokens
        wanted = (len(token_ids) - 1) // self._block_tokens
        room = (STAGED_BYTES - self._staged_bytes) // self._block_bytes
        chain = extend_chain(root, token_ids[: wanted * self._block_tokens],
                             self._block_tokens, self._key)  # fmt: skip
        asked.staged = self._read(chain[: asked.first + max(0, room)], asked.first)
        self._staged_bytes += len(asked.staged) * self._block_bytes
        return len(asked.staged) * self._block_tokens

    def step(self, scheduled: Sequence[Any]) -> Step:
        """What one forward pass loads and saves. ``scheduled`` are the interface's records
        ``RequestData`` of all its requests.

        Raises:
            RuntimeError: the engine allotted less than it was promised; it must not go on.
        """
        loads: list[tuple[int, bytearray]] = []
        saves = []
        for data in scheduled:
            if (known := self._requests.get(data.request_id)) is None:
                continue
            known.token_ids += data.new_tokens
            known.block_ids += data.new_block_ids
            promised = len(known.staged)
            loads += self._take(known)
            # the first step's position leaves out what is loaded in it
            ends_at = data.computed_position + data.num_scheduled_tokens
            if save := self._new_blocks(known, ends_at + promised * self._block_tokens):
                saves.append(save)
        return Step(tuple(loads), tuple(saves))

    def forget(self, request: int) -> None:
        """It ended; whatever was promised to it and not loaded is dropped."""
        if (known := self._requests.pop(request, None)) is not None:
            self._staged_bytes -= len(known.staged) * self._block_bytes

    def _make_room(self) -> bool:
        """For one more request. What is promised and not loaded yet must never be forgotten: the
        engine would take what lies in its blocks for the prefix."""
        if len(self._requests) < MAX_REQUESTS:
            return True
        oldest = next((name for name, one in self._requests.items() if not one.staged), None)
        if oldest is not None:
            self.forget(oldest)
        return oldest is not None

    def _read(self, chain: Sequence[BlockHash], first: int) -> list[bytearray]:
        """Proved bytes of the leading blocks of ``chain`` from ``first`` on."""
        if len(chain) <= first:
            return []
        name, found = f"trtllm-{next(self._names)}", list[bytearray]()
        with self._cache.pin(name, chain, None, 0.0) as pinned:
            for position in range(first, len(pinned.blocks)):
                target = bytearray(self._block_bytes)
                if not self._cache.load(pinned, position, memoryview(target)):
                    break
                found.append(target)
        return found

    def _take(self, known: _Request) -> list[tuple[int, bytearray]]:
        places = known.block_ids[known.first : known.first + len(known.staged)]
        if len(places) < len(known.staged):
            raise RuntimeError(
                f"{len(known.staged)} blocks were promised from block {known.first} on, the engine "
                f"allotted {len(known.block_ids)} in all"
            )
        taken = list(zip(places, known.staged, strict=True))
        self._staged_bytes -= len(known.staged) * self._block_bytes
        known.staged = []
        return taken

    def _new_blocks(
        self, known: _Request, ends_at: int
    ) -> tuple[BlockHash, tuple[tuple[BlockHash, int], ...]] | None:
        """Full blocks that were not offered yet; at first those too that the engine had itself,
        since a block is kept only behind the one before it."""
        full = min(ends_at, len(known.token_ids)) // self._block_tokens
        full = min(full, len(known.block_ids))
        if full <= known.kept:
            return None
        start = known.chain[-1] if known.chain else known.root
        more = known.token_ids[len(known.chain) * self._block_tokens : full * self._block_tokens]
        known.chain += extend_chain(start, more, self._block_tokens, self._key)
        parent = known.chain[known.kept - 1] if known.kept else b""
        new = zip(known.chain[known.kept : full], known.block_ids[known.kept : full], strict=True)
        known.kept = full
        return parent, tuple(new)


class Copies:
    """The worker's part: between the engine's blocks and bytes. Owned by the worker.

    ``tensor`` is the engine's pool, one block a row; a block's id is the number of its row, which
    `trtllm_identity.check_supported` makes sure of.

    Raises:
        ConfigError: its rows are no whole blocks of KV.
    """

    def __init__(self, tensor: torch.Tensor) -> None:
        if tensor.dtype not in DTYPES or not tensor.is_contiguous() or tensor.dim() < 2:
            raise ConfigError(
                f"TensorRT-LLM's pool: got {tensor.dtype} of shape {tuple(tensor.shape)}, "
                f"contiguous: {tensor.is_contiguous()}; expected contiguous rows of "
                f"{', '.join(map(str, DTYPES))}"
            )
        self._rows = tensor.view(torch.uint8).flatten(1) if tensor.numel() else tensor
        self.block_bytes = int(self._rows.shape[1])

    def load(self, step: Step) -> None:
        """Into the engine's blocks; done when it returns.

        Raises:
            RuntimeError: an id is no row of the pool; nothing was copied, and the engine must
                not go on.
        """
        self._check(block_id for block_id, _ in step.loads)
        for block_id, data in step.loads:
            self._rows[block_id].copy_(torch.frombuffer(data, dtype=torch.uint8))

    def save(self, step: Step, cache: PrefixCache) -> int:
        """Out of the engine's blocks, whose forward pass has ended; number of blocks kept.

        Raises:
            RuntimeError: as `load`.
        """
        self._check(block_id for _, blocks in step.saves for _, block_id in blocks)
        kept = 0
        for parent, blocks in step.saves:
            writes = [(block, self._writer(block_id)) for block, block_id in blocks]
            kept += sum(cache.save(parent, writes))
        return kept

    def _check(self, block_ids: Iterable[int]) -> None:
        rows = len(self._rows)
        if outside := [block_id for block_id in block_ids if not 0 <= block_id < rows]:
            raise RuntimeError(
                f"TensorRT-LLM names blocks {outside[:3]}, its pool has {rows} rows: ids are no "
                "rows here, and what lies in a row cannot be known; remove kv_connector_config"
            )

    def _writer(self, block_id: int) -> Write:
        def write(payload: memoryview) -> None:
            torch.frombuffer(payload, dtype=torch.uint8).copy_(self._rows[block_id])

        return write


class Meeting(Generic[T]):
    """Where an engine's scheduler and worker find each other: both are made with the same
    arguments, in threads of their own, and neither is given the other."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._made: dict[int, tuple[object, T]] = {}

    def of(self, arguments: object, make: Callable[[], T]) -> T:
        """What was made for these arguments, made by whoever asks first."""
        with self._lock:
            if id(arguments) not in self._made:
                self._made[id(arguments)] = (arguments, make())  # kept, so that the id stays its
            return self._made[id(arguments)][1]
