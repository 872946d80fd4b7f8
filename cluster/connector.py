"""vLLM's v1 KV connector, out of tree: what vLLM loads, and nothing but the passing on of calls.

    --kv-transfer-config '{"kv_connector": "PrefixfleetConnector",
        "kv_connector_module_path": "prefixfleet.cluster.connector", "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {"socket": "/run/.../node.sock", "engine": "name",
            "encoding": "exact"}}'

vLLM makes one in its scheduler and one in each worker. Loads and saves are asynchronous and a
best effort: whatever fails is computed, and what cannot be saved is a later miss.
"""

import time
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorWorkerMetadata,
    SupportsHMA,
)
from vllm.distributed.parallel_state import get_tensor_model_parallel_rank
from vllm.v1.metrics.cache_hit_source import CacheHitSource

from prefixfleet.cluster.adapter_digests import AdapterDigests
from prefixfleet.cluster.connector_identity import (
    block_content,
    check_supported,
    own_events,
    read_namespace,
)
from prefixfleet.cluster.connector_metrics import ConnectorMetrics, ConnectorStats
from prefixfleet.cluster.connector_records import Handshake, Step
from prefixfleet.cluster.connector_scheduler import SchedulerHalf
from prefixfleet.cluster.connector_worker import WorkerHalf
from prefixfleet.cluster.model import default_cache_dir
from prefixfleet.kernels.encoding import encoding_of
from prefixfleet.kernels.paged import PagedLayout
from prefixfleet.store.errors import ConfigError

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.forward_context import ForwardContext
    from vllm.v1.attention.backend import AttentionMetadata
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.outputs import KVConnectorOutput
    from vllm.v1.request import Request


class PrefixfleetConnector(KVConnectorBase_V1, SupportsHMA):  # type: ignore[misc]
    """One half of the connector, by its role. Owned by vLLM.

    Raises:
        ConfigError: a setting is unknown or missing, or the engine's KV cannot be shared.
    """

    _cache_hit_source = CacheHitSource.HOST

    def __init__(
        self,
        vllm_config: "VllmConfig",
        role: KVConnectorRole,
        kv_cache_config: "KVCacheConfig",
    ) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        check_supported(vllm_config, kv_cache_config)
        extra = self._kv_transfer_config.kv_connector_extra_config
        socket, engine, self._encoding = _read_settings(extra)
        self._handshake: Handshake | None = None
        if role is KVConnectorRole.SCHEDULER:
            self._scheduler = SchedulerHalf(
                socket,
                engine,
                AdapterDigests(default_cache_dir()),
                time.monotonic,
                own_events(vllm_config),
            )
        else:
            self._worker = WorkerHalf(socket, engine)

    @property
    def requires_kv_delivery(self) -> bool:
        """A cache: what is not saved is a later miss."""
        return False

    # scheduler

    def set_xfer_handshake_metadata(self, metadata: dict[int, Handshake]) -> None:
        self._scheduler.open(metadata)

    def on_new_request(self, request: "Request") -> None:
        self._scheduler.arrived(request)

    def get_num_new_matched_tokens(
        self, request: "Request", num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        tokens = self._scheduler.match(request, num_computed_tokens)
        return tokens, bool(tokens)

    def update_state_after_alloc(
        self, request: "Request", blocks: "KVCacheBlocks", num_external_tokens: int
    ) -> None:
        self._scheduler.allocated(request, blocks.get_block_ids()[0], num_external_tokens)

    def build_connector_meta(self, scheduler_output: "SchedulerOutput") -> Step:
        return self._scheduler.build(scheduler_output)

    def update_connector_output(self, connector_output: "KVConnectorOutput") -> None:
        self._scheduler.update(connector_output)

    def request_finished_all_groups(
        self, request: "Request", block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        return self._scheduler.finished(request, block_ids[0])

    def get_kv_connector_stats(self) -> ConnectorStats | None:
        """Of the scheduler half; it hears what the workers did."""
        if self.role is not KVConnectorRole.SCHEDULER:
            return None
        return ConnectorStats(self._scheduler.take_counts())

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> ConnectorStats:
        return ConnectorStats(data or {})

    @classmethod
    def build_prom_metrics(
        cls,
        vllm_config: "VllmConfig",
        metric_types: dict[Any, Any],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> ConnectorMetrics:
        return ConnectorMetrics(vllm_config, metric_types, labelnames, per_engine_labelvalues)

    def has_pending_push_work(self) -> bool:
        return self._scheduler.is_busy

    def reset_cache(self) -> bool:
        return self._scheduler.reset()

    # worker, in the order of one step

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        try:
            content = block_content(self._vllm_config, kv_caches, self._encoding)
            layout = PagedLayout.from_tensors(kv_caches, content=content)
            namespace = read_namespace(
                self._vllm_config, self._kv_cache_config, kv_caches, layout, default_cache_dir()
            )
            namespace = replace(namespace, encoding=self._encoding)
            rank = get_tensor_model_parallel_rank()
            payload_bytes = self._worker.open(rank, kv_caches, layout, namespace)
        except ValueError as error:
            raise ConfigError(f"prefixfleet cannot copy this engine's KV: {error}") from error
        self._handshake = Handshake(namespace=asdict(namespace), payload_bytes=payload_bytes)

    def get_handshake_metadata(self) -> Handshake | None:
        return self._handshake

    def handle_preemptions(self, kv_connector_metadata: KVConnectorMetadata) -> None:
        assert isinstance(kv_connector_metadata, Step)
        self._worker.begin(kv_connector_metadata)

    def start_load_kv(self, forward_context: "ForwardContext", **kwargs: object) -> None:
        """Loads began in `handle_preemptions`, beside the forward."""

    def wait_for_layer_load(self, layer_name: str) -> None:
        """No step computes with blocks that are still on their way."""

    def save_kv_layer(
        self,
        layer_name: str,
        kv_layer: torch.Tensor,
        attn_metadata: "AttentionMetadata",
        **kwargs: object,
    ) -> None:
        """Whole blocks are saved after the step."""

    def wait_for_save(self) -> None:
        self._worker.end(self._step())

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str], set[str]]:
        return self._worker.collect(self._step())

    def get_block_ids_with_load_errors(self) -> set[int]:
        return self._worker.take_bad_blocks()

    def build_connector_worker_meta(self) -> KVConnectorWorkerMetadata | None:
        return self._worker.take_report()

    def shutdown(self) -> None:
        half = self._scheduler if self.role is KVConnectorRole.SCHEDULER else self._worker
        half.close()

    def _step(self) -> Step:
        step = self._get_connector_metadata()
        assert isinstance(step, Step)
        return step


def _read_settings(extra: dict[str, Any]) -> tuple[Path, str, str]:
    values = {"encoding": "exact"} | extra
    is_text = all(value and isinstance(value, str) for value in values.values())
    if set(values) != {"socket", "engine", "encoding"} or not is_text:
        raise ConfigError(
            f"kv_connector_extra_config: got {extra}, expected the texts 'socket' (the node "
            "daemon's Unix socket), 'engine' (a name for this engine), 'encoding' (of blocks, if "
            "not 'exact') and nothing else"
        )
    try:
        encoding_of(values["encoding"])
    except ValueError as error:
        raise ConfigError(f"kv_connector_extra_config: {error}") from None
    return Path(values["socket"]), values["engine"], values["encoding"]
