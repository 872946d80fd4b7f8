"""A TensorRT-LLM engine as its connector sees it: the published order of calls, around a "model"
whose KV is a function of all tokens up to a place. Not our code under test.

The order is that of ``KvCacheConnectorManager`` and ``KVCacheManager.addSequence`` in 1.1 to 1.3:
what is matched is asked once a request, the blocks are allotted, each step binds what the scheduler
built, loads, computes, waits for saves; the first step's position leaves out what is loaded.
"""

import hashlib
import itertools
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from types import ModuleType, SimpleNamespace
from typing import Any

import torch

TOKENS, LAYERS, ROW = 16, 2, 64


@dataclass
class Asked:
    """A request as the interface shows it."""

    request_id: int
    tokens: list[int]
    cache_salt_id: int | None = None
    lora_task_id: int | None = None
    multimodal_hashes: Any = None
    block_ids: list[int] = field(default_factory=list)

    def get_tokens(self, beam: int) -> list[int]:
        return list(self.tokens)


def kv_of(tokens: Sequence[int], scope: object) -> torch.Tensor:
    """KV of the last block of ``tokens``."""
    seed = hashlib.sha256(repr((list(tokens), scope)).encode()).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(seed[:7], "big"))
    return torch.randn((LAYERS, 2, ROW), generator=generator).to(torch.bfloat16)


class TrtllmEngine:
    """One engine; ``computed`` counts blocks that it had to compute."""

    def __init__(
        self,
        interface: ModuleType,
        connector: ModuleType,
        model: str,
        blocks: int = 128,
        **arguments: object,
    ) -> None:
        self._interface = interface
        config = SimpleNamespace(tokens_per_block=TOKENS)
        self.llm_args = SimpleNamespace(
            model=model,
            kv_cache_config=config,
            tensor_parallel_size=1,
            attn_backend="TRTLLM",
            **arguments,
        )
        self.pool = torch.zeros((blocks, LAYERS, 2, ROW), dtype=torch.bfloat16)
        self._free = list(range(blocks))
        self._ids = itertools.count(1)
        self.computed = 0
        self.synchronized = 0
        with ThreadPoolExecutor(2) as threads:  # as published: at the same time
            worker = threads.submit(connector.PrefixfleetWorker, self.llm_args)
            scheduler = threads.submit(connector.PrefixfleetScheduler, self.llm_args)
            self.worker, self.scheduler = worker.result(), scheduler.result()
        self.worker.register_kv_caches(self.pool)

    def synchronize(self) -> None:
        """Of the stream, which the engine hands out."""
        self.synchronized += 1

    def begin(
        self, tokens: Sequence[int], on_device: Sequence[int] = (), **fields: Any
    ) -> tuple[Asked, int]:
        """Ask what is matched and allot blocks; (request, matched tokens)."""
        request = Asked(next(self._ids), list(tokens), **fields)
        matched, is_async = self.scheduler.get_num_new_matched_tokens(
            request, len(on_device) * TOKENS
        )
        assert not is_async
        need = -(-len(tokens) // TOKENS) - len(on_device)
        request.block_ids = [*on_device, *(self._free.pop() for _ in range(need))]
        self.scheduler.update_state_after_alloc(request, request.block_ids)
        return request, matched

    def prefill(self, request: Asked, on_device: int, matched: int, chunk: int = 10_000) -> None:
        """In chunks of ``chunk`` tokens."""
        position, first = on_device * TOKENS + matched, True
        while position < len(request.tokens):
            ahead = min(chunk, len(request.tokens) - position)
            self._forward(
                request,
                new_tokens=request.tokens if first else [],
                new_blocks=request.block_ids if first else [],
                told=position - (matched if first else 0),
                start=position,
                ahead=ahead,
            )
            position, first = position + ahead, False

    def decode(self, request: Asked, token: int) -> None:
        """One step with one more token."""
        request.tokens.append(token)
        new = []
        if len(request.tokens) > len(request.block_ids) * TOKENS:
            new = [self._free.pop()]
            request.block_ids += new
        at = len(request.tokens) - 1
        self._forward(request, new_tokens=[token], new_blocks=new, told=at, start=at, ahead=1)

    def end(self, request: Asked) -> None:
        """Its blocks are free; what they hold stays until they are allotted again."""
        assert not self.scheduler.request_finished(request, request.block_ids)
        self._free = [*request.block_ids, *self._free]

    def blocks_of(self, request: Asked) -> list[torch.Tensor]:
        """The full blocks, as the attention of the next step would read them."""
        full = len(request.tokens) // TOKENS
        return [self.pool[block].clone() for block in request.block_ids[:full]]

    def _forward(
        self,
        request: Asked,
        *,
        new_tokens: list[int],
        new_blocks: list[int],
        told: int,
        start: int,
        ahead: int,
    ) -> None:
        data = self._interface.RequestData(
            request.request_id, list(new_tokens), list(new_blocks), told, ahead
        )
        is_new = bool(new_tokens) and len(new_tokens) == len(request.tokens)
        output = self._interface.SchedulerOutput(*([[data], []] if is_new else [[], [data]]))
        self.worker.bind_connector_meta(self.scheduler.build_connector_meta(output))
        self.worker.start_load_kv(self)
        for layer in range(LAYERS):
            self.worker.wait_for_layer_load(layer, self)
            self.worker.save_kv_layer(layer, self)
        scope = (request.cache_salt_id, request.lora_task_id)
        for block in range(start // TOKENS, (start + ahead) // TOKENS):
            self.pool[request.block_ids[block]] = kv_of(
                request.tokens[: (block + 1) * TOKENS], scope
            )
            self.computed += 1
        self.worker.wait_for_save(self)
        assert self.worker.get_finished([], []) == ([], [])
