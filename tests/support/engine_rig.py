"""A vLLM engine without a model: the real scheduler, the real connector in both roles, and a
"forward" whose KV is a function of the tokens, so that every block can be proved at every step.

The KV of a position is a running digest of all tokens up to it. The next token is computed from
the KV of the whole prefix as it lies in the paged cache: one wrong block, and the answer differs.
"""

import json
import os
import pickle
import random
import warnings
from collections import Counter, deque
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

os.environ |= {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "VLLM_LOGGING_LEVEL": "ERROR"}
with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    import torch
    from vllm.config import (
        CacheConfig,
        DeviceConfig,
        KVEventsConfig,
        KVTransferConfig,
        ModelConfig,
        ParallelConfig,
        SchedulerConfig,
        VllmConfig,
    )
    from vllm.distributed.kv_transfer.kv_connector.utils import KVOutputAggregator
    from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
    from vllm.sampling_params import SamplingParams
    from vllm.utils.hashing import sha256
    from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
    from vllm.v1.core.sched.async_scheduler import AsyncScheduler
    from vllm.v1.core.sched.scheduler import Scheduler
    from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
    from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput
    from vllm.v1.request import Request, RequestStatus
    from vllm.v1.structured_output import StructuredOutputManager

    from prefixfleet.cluster.connector import PrefixfleetConnector

BLOCK = 16
LAYERS, HEADS, CHANNELS = 3, 2, 8
STATE_BITS = 20
VOCAB = 997
MAX_LEN = 1024


def model_folder(folder: Path, weights: bytes = b"weights") -> Path:
    """A model that is never computed: its configuration, and some bytes to identify."""
    folder.mkdir(parents=True, exist_ok=True)
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": 64,
        "intermediate_size": 64,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS,
        "num_key_value_heads": HEADS,
        "head_dim": 32,
        "vocab_size": VOCAB,
        "max_position_embeddings": MAX_LEN,
        "torch_dtype": "float32",
    }
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "model.safetensors").write_bytes(weights)
    return folder


def engine_config(
    model: Path,
    socket: Path,
    *,
    step_tokens: int = 64,
    ranks: int = 1,
    blocks: int = 64,
    overlap: bool = False,
    policy: str = "recompute",
    extra: dict[str, Any] | None = None,
    encoding: str = "exact",
    isa: str = "vec",
    events: Path | None = None,
) -> VllmConfig:
    """What vLLM hands a connector; ``overlap`` is asynchronous scheduling. With a folder for
    ``events`` the engine publishes its KV events on sockets in it."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        config = VllmConfig(
            model_config=ModelConfig(
                model=str(model), skip_tokenizer_init=True, dtype="float32", max_model_len=MAX_LEN
            ),
            scheduler_config=SchedulerConfig(
                max_num_seqs=8,
                max_num_batched_tokens=step_tokens,
                max_model_len=MAX_LEN,
                is_encoder_decoder=False,
            ),
            cache_config=CacheConfig(block_size=BLOCK),
            parallel_config=ParallelConfig(distributed_executor_backend="mp"),
            device_config=DeviceConfig("cpu"),
            kv_transfer_config=KVTransferConfig(
                kv_connector="PrefixfleetConnector",
                kv_connector_module_path="prefixfleet.cluster.connector",
                kv_role="kv_both",
                kv_load_failure_policy=policy,
                kv_connector_extra_config=extra
                or {"socket": str(socket), "engine": "rig", "encoding": encoding},
            ),
        )
    if events:
        config.kv_events_config = KVEventsConfig(
            enable_kv_cache_events=True,
            publisher="zmq",
            endpoint=f"ipc://{events}/rig.kve",
            replay_endpoint=f"ipc://{events}/rig.kvr",
        )
    config.parallel_config.tensor_parallel_size = ranks
    config.scheduler_config.async_scheduling = overlap
    config.cache_config.num_gpu_blocks = blocks
    layers = [f"layers.{i}" for i in range(LAYERS)]
    kernel = SimpleNamespace(isa=isa)
    config.compilation_config.static_forward_context = dict.fromkeys(layers, kernel)
    return config


def kv_config(blocks: int = 64) -> KVCacheConfig:
    """One group of full attention."""
    layers = [f"layers.{i}" for i in range(LAYERS)]
    spec = FullAttentionSpec(
        block_size=BLOCK, num_kv_heads=HEADS, head_size=CHANNELS // 2, dtype=torch.float32
    )
    return KVCacheConfig(
        num_blocks=blocks, kv_cache_tensors=[], kv_cache_groups=[KVCacheGroupSpec(layers, spec)]
    )


def caches_of(blocks: int, dtype: torch.dtype = torch.float32) -> dict[str, torch.Tensor]:
    """Paged KV of one rank, full of what no forward writes."""
    shape = (blocks, HEADS, BLOCK, CHANNELS)
    return {f"layers.{i}": torch.full(shape, -1.0, dtype=dtype) for i in range(LAYERS)}


def new_request(
    name: str,
    prompt: Sequence[int] | None,
    max_tokens: int = 4,
    params: dict[str, Any] | None = None,
    sampling: dict[str, Any] | None = None,
    **fields: Any,
) -> Request:
    """A request as the engine core makes it."""
    extra = {"kv_transfer_params": params} if params is not None else None
    options = SamplingParams(
        max_tokens=max_tokens, ignore_eos=True, extra_args=extra, **sampling or {}
    )
    return Request(
        request_id=name,
        prompt_token_ids=None if prompt is None else list(prompt),
        sampling_params=options,
        pooling_params=None,
        **fields,
    )


def digests(tokens: Sequence[int]) -> list[int]:
    """The KV of every position: exact in float32."""
    state, states = 1, []
    for token in tokens:
        state = (state * 31 + int(token) + 7) % 1_000_003
        states.append(state)
    return states


def next_token(states: Sequence[int]) -> int:
    """The "model": depends on the KV of the whole prefix."""
    return int(sum((i + 1) * s for i, s in enumerate(states)) % (VOCAB - 1)) + 1


def expected_answer(prompt: Sequence[int], count: int) -> list[int]:
    """What an engine without any cache answers."""
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(next_token(digests(tokens)))
    return tokens[len(prompt) :]


def prompt_of(length: int, seed: int = 0) -> list[int]:
    """Token ids; equal seeds share their beginnings."""
    return random.Random(seed).choices(range(1, VOCAB - 90), k=length)


def bits_of(state: int, rank: int) -> torch.Tensor:
    """A state twice over and its rank, as signs for all elements of one position."""
    bits = [*f"{state:0{STATE_BITS}b}"[::-1]] * 2 + [*f"{rank:08b}"]
    return torch.tensor([1.0 if b == "1" else -1.0 for b in bits]).view(LAYERS, HEADS, CHANNELS)


class Rank:
    """One worker: its paged KV, its connector, and its turn in a step.

    Encoded, a position's KV is the state's bits as signs, which 8 bits hold; else it is the state
    itself. ``huge``: positions whose values 8 bits cannot hold.
    """

    def __init__(self, number: int, config: VllmConfig, kv: KVCacheConfig) -> None:
        self.number = number
        self.huge: set[int] = set()
        extra = config.kv_transfer_config.kv_connector_extra_config
        self._in_bits = extra.get("encoding", "exact") != "exact"
        self.caches = caches_of(kv.num_blocks)
        self.connector = PrefixfleetConnector(config, KVConnectorRole.WORKER, kv)
        # the only thing of vLLM's that needs a real group of processes
        rank = "prefixfleet.cluster.connector.get_tensor_model_parallel_rank"
        with patch(rank, return_value=number):
            self.connector.register_kv_caches(self.caches)

    def write(self, blocks: Sequence[int], position: int, state: int) -> None:
        """What a forward leaves of one position."""
        block, offset = blocks[position // BLOCK], position % BLOCK
        if self._in_bits:
            signs = bits_of(state, self.number) * (3e38 if position in self.huge else 1)
            for cache, part in zip(self.caches.values(), signs, strict=True):
                cache[block, :, offset, :] = part
            return
        for layer, cache in enumerate(self.caches.values()):
            cache[block, :, offset, :] = state + layer + 100 * self.number

    def read(self, blocks: Sequence[int], count: int) -> list[int]:
        """States of the first ``count`` positions, each the same in every layer and channel."""
        if self._in_bits:
            return self._read_bits(blocks, count)
        states = None
        for layer, cache in enumerate(self.caches.values()):
            values = cache[list(blocks)].transpose(1, 2).reshape(-1, HEADS * CHANNELS)[:count]
            found = values - layer - 100 * self.number
            assert torch.equal(found, found[:, :1].expand_as(found)), "torn block"
            assert states is None or torch.equal(states, found[:, 0]), "layers differ"
            states = found[:, 0]
        assert states is not None
        return [int(s) for s in states.tolist()]

    def _read_bits(self, blocks: Sequence[int], count: int) -> list[int]:
        layers = [cache[list(blocks)].transpose(1, 2) for cache in self.caches.values()]
        signs = torch.stack(layers, 2).reshape(-1, LAYERS, HEADS, CHANNELS)[:count].sign()
        powers = 2.0 ** torch.arange(STATE_BITS)
        states = [int(s) for s in ((signs.flatten(1)[:, :STATE_BITS] > 0) * powers).sum(1)]
        for state, found in zip(states, signs, strict=True):
            assert torch.equal(found, bits_of(state, self.number)), "torn block"
        return states


class EngineRig:
    """Steps like vLLM's engine core does: schedule, work, update; with ``overlap`` one ahead."""

    def __init__(self, config: VllmConfig, *, blocks: int = 64) -> None:
        self.config = config
        kv = kv_config(blocks)
        kind = AsyncScheduler if config.scheduler_config.async_scheduling else Scheduler
        self.scheduler = kind(
            vllm_config=config,
            kv_cache_config=kv,
            structured_output_manager=StructuredOutputManager(config),
            block_size=BLOCK,
            log_stats=True,
        )
        ranks = config.parallel_config.tensor_parallel_size
        self.ranks = [Rank(number, config, kv) for number in range(ranks)]
        self.connector = self.scheduler.connector
        assert isinstance(self.connector, PrefixfleetConnector)
        self.connector.set_xfer_handshake_metadata_pp_aware(
            {(0, r.number): self._travel(r.connector.get_handshake_metadata()) for r in self.ranks}
        )
        init_none_hash(sha256)
        self._hasher = get_request_block_hasher(BLOCK, sha256)
        self._aggregator = KVOutputAggregator(ranks)
        self._depth = 2 if config.scheduler_config.async_scheduling else 1
        self._flying: deque[tuple[Any, ModelRunnerOutput]] = deque()
        self._tokens: dict[str, list[int]] = {}
        self._free_blocks = self.free_blocks
        self.answers: dict[str, list[int]] = {}
        self.reports: dict[str, dict[str, Any]] = {}
        self.counts: Counter[str] = Counter()
        self.preemptions = 0

    @property
    def free_blocks(self) -> int:
        return int(self.scheduler.kv_cache_manager.block_pool.get_num_free_blocks())

    def close(self) -> None:
        for rank in self.ranks:
            rank.connector.shutdown()
        self.scheduler.shutdown()

    def add(self, name: str, prompt: Sequence[int], max_tokens: int = 4, **fields: Any) -> None:
        request = new_request(name, prompt, max_tokens, block_hasher=self._hasher, **fields)
        self.answers[name] = []
        self.scheduler.add_request(request)

    def abort(self, name: str) -> None:
        self.scheduler.finish_requests(name, RequestStatus.FINISHED_ABORTED)

    def run(self, steps: int = 20_000) -> None:
        """Until nothing is left to do, saves included."""
        for _ in range(steps):
            if not self.scheduler.has_requests() and not self._flying:
                assert self.free_blocks == self._free_blocks, "blocks leaked"
                assert not self.scheduler.requests
                return
            self.step()
        raise AssertionError(f"not over after {steps} steps: {self.scheduler.requests}")

    def step(self) -> None:
        """As the engine core's loop."""
        if self.scheduler.has_requests():
            output = self.schedule()
            self.work(output)
            if len(self._flying) < self._depth and output.total_num_scheduled_tokens:
                return
        self.update()

    def schedule(self) -> Any:
        """First part of a step; `work` and `update` must follow."""
        output = self.scheduler.schedule()
        self.preemptions += len(output.preempted_req_ids or ())
        return output

    def work(self, output: Any) -> None:
        """What the workers do in a step."""
        self._flying.append((output, self._work(output)))

    def update(self) -> None:
        """The scheduler hears of the oldest step that it has not heard of."""
        output, result = self._flying.popleft()
        for batch in self.scheduler.update_from_output(output, result).values():
            if batch.scheduler_stats is not None:
                self.counts.update(batch.scheduler_stats.kv_connector_stats or {})
            for one in batch.outputs:
                self.answers[one.request_id] += one.new_token_ids
                if one.kv_transfer_params is not None:
                    self.reports[one.request_id] = one.kv_transfer_params["prefixfleet"]

    def schedule_load(self) -> Any:
        """Step until a load is scheduled; it has not begun when this returns."""
        for _ in range(2000):
            output = self.schedule()
            if output.kv_connector_metadata.loads:
                return output
            self.work(output)
            self.update()
        raise AssertionError("no load was scheduled")

    def _work(self, output: Any) -> ModelRunnerOutput:
        results = [self._work_rank(rank, output) for rank in self.ranks]
        return self._aggregator.aggregate(results)

    def _work_rank(self, rank: Rank, output: Any) -> ModelRunnerOutput:
        connector, step = rank.connector, self._travel(output.kv_connector_metadata)
        connector.handle_preemptions(step)
        connector.bind_connector_metadata(step)
        sampled = self._forward(rank, output)
        connector.start_load_kv(None)
        connector.wait_for_save()
        moved = connector.get_transfer_results(output.finished_req_ids)
        result = KVConnectorOutput(
            finished_sending=moved.finished_sending,
            finished_recving=moved.finished_recving,
            invalid_block_ids=connector.get_block_ids_with_load_errors(),
            kv_connector_worker_meta=self._travel(connector.build_connector_worker_meta()),
        )
        connector.clear_connector_metadata()
        ids = list(output.num_scheduled_tokens)
        return ModelRunnerOutput(
            req_ids=ids,
            req_id_to_index={name: i for i, name in enumerate(ids)},
            sampled_token_ids=sampled,
            kv_connector_output=result,
        )

    def _forward(self, rank: Rank, output: Any) -> list[list[int]]:
        first = self._first_positions(output)
        sampled = []
        for name, count in output.num_scheduled_tokens.items():
            request = self.scheduler.requests[name]
            if rank.number == 0 and (name not in self._tokens or first[name][1]):
                self._tokens[name] = list(request.all_token_ids)
            tokens, start = self._tokens[name], first[name][0]
            (blocks,) = self.scheduler.kv_cache_manager.get_block_ids(name)
            states = digests(tokens)
            assert rank.read(blocks, start) == states[:start], f"{name}: wrong KV before {start}"
            for position in range(start, start + count):
                rank.write(blocks, position, states[position])
            is_last = start + count == len(tokens)
            sampled.append([next_token(rank.read(blocks, len(tokens)))] if is_last else [])
        if rank is self.ranks[-1]:
            for name, new in zip(output.num_scheduled_tokens, sampled, strict=True):
                self._tokens[name] += new
        return sampled

    @staticmethod
    def _first_positions(output: Any) -> dict[str, tuple[int, bool]]:
        """First computed position of each scheduled request, and whether it (re)starts."""
        first = {new.req_id: (new.num_computed_tokens, True) for new in output.scheduled_new_reqs}
        cached = output.scheduled_cached_reqs
        for name, computed in zip(cached.req_ids, cached.num_computed_tokens, strict=True):
            first[name] = (computed, name in cached.resumed_req_ids)
        return first

    @staticmethod
    def _travel(value: Any) -> Any:
        """As between processes."""
        return pickle.loads(pickle.dumps(value))


def answer(
    rig: EngineRig, name: str, prompt: Sequence[int], count: int = 4, **fields: Any
) -> list[int]:
    """One request, run until the engine has nothing left to do."""
    rig.add(name, prompt, count, **fields)
    rig.run()
    return rig.answers[name]
