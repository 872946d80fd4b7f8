"""`PrefixfleetScheduler` and `PrefixfleetWorker`: TensorRT-LLM keeps KV blocks in this node's pool.

In the engine's YAML (``--extra_llm_api_options``), with PREFIXFLEET_TRTLLM_SOCKET_PATH set to the
socket of the node's daemon:

    kv_connector_config:
      connector_module: prefixfleet.cluster.trtllm_connector
      connector_scheduler_class: PrefixfleetScheduler
      connector_worker_class: PrefixfleetWorker
    kv_cache_config: {enable_partial_reuse: false, host_cache_size: 0}

Written for the interface that TensorRT-LLM publishes as ``KvCacheConnectorScheduler`` and
``KvCacheConnectorWorker`` (1.1 to 1.3). **No engine was run with it**, and its package cannot be
installed where the tests run: they drive it in the published order of calls. One rank only; blocks
of this node only (a pull would hold up every request); loads and saves hold up the forward pass.
"""

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

import torch

try:
    from tensorrt_llm._torch.pyexecutor.kv_cache_connector import (
        KvCacheConnectorScheduler,
        KvCacheConnectorWorker,
    )
except ModuleNotFoundError:  # where newer versions have it
    from tensorrt_llm._torch.pyexecutor.connectors.kv_cache_connector import (
        KvCacheConnectorScheduler,
        KvCacheConnectorWorker,
    )

from prefixfleet.cluster.cache_api import NodePrefixCache
from prefixfleet.cluster.model import default_cache_dir
from prefixfleet.cluster.settings import TrtllmSettings
from prefixfleet.cluster.trtllm_blocks import Copies, Meeting, Promises, Step
from prefixfleet.cluster.trtllm_identity import check_supported, model_digest
from prefixfleet.cluster.weights import weights_digest
from prefixfleet.store.errors import ConfigError
from prefixfleet.store.namespace import Namespace, Scope, chain_root
from prefixfleet.store.slot import SlotLayout

if TYPE_CHECKING:
    from tensorrt_llm._torch.pyexecutor.kv_cache_connector import SchedulerOutput
    from tensorrt_llm.bindings.internal.batch_manager import LlmRequest
    from tensorrt_llm.llmapi.llm_args import TorchLlmArgs

START_S = 10.0


class Rank:
    """What scheduler and worker of an engine share. Made by whichever comes first.

    Raises:
        ConfigError: its blocks cannot be kept, see `trtllm_identity.check_supported`.
    """

    def __init__(self, llm_args: "TorchLlmArgs") -> None:
        check_supported(llm_args)
        self.socket = TrtllmSettings.read().socket_path
        self.model = Path(llm_args.model)
        self.identity = f"{self.model.name}/{model_digest(llm_args)}"
        self.backend = str(getattr(llm_args, "attn_backend", "unknown"))
        self.block_tokens = int(llm_args.kv_cache_config.tokens_per_block)
        self.namespace_digest = b""
        self.hash_key = b""
        self.promises: Promises | None = None

    def connect(self, tensor: torch.Tensor) -> tuple[NodePrefixCache, Copies]:
        """Now the engine's pool is known. Raises `ConfigError`: the daemon refuses us."""
        copies = Copies(tensor)
        namespace = Namespace(
            model=self.identity,
            weights=weights_digest(self.model, default_cache_dir()),
            dtype=str(tensor.dtype),
            block_tokens=self.block_tokens,
            layout=f"trtllm/{self.backend}/{list(tensor.shape[1:])}",
            engine="trtllm",
            isa="any",
            tensor_parallel=1,
        )
        layout = SlotLayout(payload_bytes=copies.block_bytes)
        cache = NodePrefixCache(self.socket, "trtllm-0", asdict(namespace), layout, 0)
        try:
            welcome = cache.welcome(START_S)
        except ConfigError:
            cache.close()
            raise
        self.namespace_digest, self.hash_key = welcome.namespace_digest, welcome.hash_key
        self.promises = Promises(cache, welcome.hash_key, self.block_tokens, copies.block_bytes)
        return cache, copies

    def root(self, request: "LlmRequest") -> bytes | None:
        """Root of a request's chain; None where tokens and salt do not name its blocks."""
        if request.lora_task_id is not None or request.multimodal_hashes is not None:
            return None
        salt = request.cache_salt_id  # a number, of the text that the client sent
        scope = Scope(salt="" if salt is None else str(salt))
        return chain_root(self.namespace_digest, scope, self.hash_key)


def rank_of(llm_args: "TorchLlmArgs") -> Rank:
    """The engine's. Raises `ConfigError`: it cannot be served."""
    return _RANKS.of(llm_args, lambda: Rank(llm_args))


_RANKS: Meeting[Rank] = Meeting()


class PrefixfleetScheduler(KvCacheConnectorScheduler):  # type: ignore[misc]
    """See the module. Called from the engine's loop."""

    def __init__(self, llm_args: "TorchLlmArgs") -> None:
        super().__init__(llm_args)
        self._rank = rank_of(llm_args)

    def get_num_new_matched_tokens(
        self, request: "LlmRequest", num_computed_tokens: int
    ) -> tuple[int, bool]:
        """See the interface: what is promised is here already, so nothing loads asynchronously."""
        promises, root = self._rank.promises, self._rank.root(request)
        if promises is None or root is None:
            return 0, False
        tokens = request.get_tokens(0)
        return promises.promise(request.request_id, root, tokens, num_computed_tokens), False

    def update_state_after_alloc(self, request: "LlmRequest", block_ids: list[int]) -> None:
        """See the interface: the same blocks come with the next step."""

    def build_connector_meta(self, scheduler_output: "SchedulerOutput") -> Step:
        """See the interface."""
        scheduled = [*scheduler_output.new_requests, *scheduler_output.cached_requests]
        return self._rank.promises.step(scheduled) if self._rank.promises else Step()

    def request_finished(self, request: "LlmRequest", cache_block_ids: list[int]) -> bool:
        """See the interface: no save outlives its forward pass."""
        if self._rank.promises:
            self._rank.promises.forget(request.request_id)
        return False


class PrefixfleetWorker(KvCacheConnectorWorker):  # type: ignore[misc]
    """See the module. Called from the engine's loop."""

    def __init__(self, llm_args: "TorchLlmArgs") -> None:
        super().__init__(llm_args)
        self._rank = rank_of(llm_args)
        self._parts: tuple[NodePrefixCache, Copies] | None = None

    def register_kv_caches(self, kv_cache_tensor: torch.Tensor) -> None:
        """See the interface: only now the size of a block is known, and the daemon is asked."""
        self._parts = self._rank.connect(kv_cache_tensor)

    def start_load_kv(self, stream: torch.cuda.Stream) -> None:
        """See the interface; all loads are done when it returns."""
        step = self.get_connector_meta()
        if self._parts and isinstance(step, Step):
            self._parts[1].load(step)

    def wait_for_layer_load(self, layer_idx: int, stream: torch.cuda.Stream) -> None:
        """See `start_load_kv`."""

    def save_kv_layer(self, layer_idx: int, stream: torch.cuda.Stream) -> None:
        """See `wait_for_save`: a block is kept with all its layers."""

    def wait_for_save(self, stream: torch.cuda.Stream) -> None:
        """See the interface."""
        step = self.get_connector_meta()
        if self._parts and isinstance(step, Step) and step.saves:
            stream.synchronize()
            cache, copies = self._parts
            copies.save(step, cache)

    def get_finished(
        self, finished_gen_req_ids: list[int], started_loading_req_ids: list[int]
    ) -> tuple[list[int], list[int]]:
        """See the interface: nothing is asynchronous."""
        return [], []

    def close(self) -> None:
        """Give back what is held; the daemon does the same when this process ends."""
        if self._parts:
            self._parts[0].close()
        self._parts = self._rank.promises = None
