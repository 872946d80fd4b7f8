"""`PrefixfleetStorage`: SGLang's HiCache keeps its third level in this fleet.

    python -m sglang.launch_server ... --enable-hierarchical-cache --hicache-storage-backend dynamic
      --hicache-storage-backend-extra-config '{"backend_name": "prefixfleet", "interface_v1": 1,
        "module_path": "prefixfleet.cluster.sglang_backend", "class_name": "PrefixfleetStorage",
        "socket": "/run/prefixfleet/NODE.sock", "model_path": "/models/M"}'

with PREFIXFLEET_REDIS_URL and PREFIXFLEET_FLEET set as for the node daemon. Checked against the
interface of SGLang 0.5.23; no SGLang engine was run. Pools besides KV (Mamba, sliding windows,
indexers) are refused: such a model gets no hits. So are engines with LoRA adapters, whose pages
SGLang names by an adapter's name and path, whatever is in its files.
"""

import contextlib
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from sglang.srt.mem_cache.hicache_storage import (
    HiCacheStorage,
    HiCacheStorageConfig,
    HiCacheStorageExtraInfo,
)
from sglang.srt.runtime_context import get_lora

from prefixfleet.cluster.cache_api import NodePrefixCache
from prefixfleet.cluster.hicache import HiCachePages, HostPool, layout_of, page_bytes
from prefixfleet.cluster.hicache_sources import Sources
from prefixfleet.cluster.model import default_cache_dir
from prefixfleet.cluster.weights import weights_digest
from prefixfleet.store.errors import ConfigError
from prefixfleet.store.namespace import Namespace
from prefixfleet.store.redis_index import RedisIndex
from prefixfleet.store.settings import FleetSettings
from prefixfleet.store.slot import SlotLayout

START_S = 10.0


class PrefixfleetStorage(HiCacheStorage):  # type: ignore[misc]
    """One rank's storage. Made, and attached to its host pool, by SGLang's controller.

    Raises:
        ConfigError: a field of the extra config is missing, or the node daemon refuses us.
    """

    def __init__(self, config: HiCacheStorageConfig, kwargs: dict[str, Any]) -> None:
        extra = config.extra_config or {}
        missing = [name for name in ("socket", "model_path") if not extra.get(name)]
        if missing:
            raise ConfigError(f"hicache-storage-backend-extra-config: {', '.join(missing)} missing")
        if not extra.get("interface_v1"):
            raise ConfigError("hicache-storage-backend-extra-config: set interface_v1 to 1")
        if config.pp_size > 1 or config.dcp_size > 1 or config.attn_cp_size > 1:
            raise ConfigError("prefixfleet keeps pages of tensor-parallel engines only")
        if get_lora().enable_lora:
            raise ConfigError("--enable-lora: prefixfleet keeps pages of engines without it only")
        self._config = config
        self._socket, self._model = Path(extra["socket"]), Path(extra["model_path"])
        self._pages: HiCachePages | None = None
        self._open = contextlib.ExitStack()

    def register_mem_pool_host(self, mem_pool_host: HostPool) -> None:
        """Connect to the node's daemon: only now the size of a page is known."""
        super().register_mem_pool_host(mem_pool_host)
        config = self._config
        ranks = 1 if config.is_mla_model else config.tp_size
        namespace = Namespace(
            model=config.model_name or self._model.name,
            weights=weights_digest(self._model, default_cache_dir()),
            dtype=str(mem_pool_host.get_dummy_flat_data_page().dtype),
            block_tokens=mem_pool_host.page_size,
            layout=layout_of(mem_pool_host),
            engine="sglang",
            isa="any",
            tensor_parallel=config.tp_size,
        )
        cache = NodePrefixCache(
            self._socket,
            f"sglang-{config.tp_rank}",
            asdict(namespace),
            SlotLayout(payload_bytes=page_bytes(mem_pool_host), shards=ranks),
            0 if config.is_mla_model else config.tp_rank,
        )
        self._open.callback(cache.close)
        welcome = cache.welcome(START_S)
        fleet = FleetSettings.read()
        index = RedisIndex(fleet.redis_url.get_secret_value(), fleet.fleet)
        sources = Sources(index, welcome.node)
        self._open.callback(sources.close)
        self._pages = HiCachePages(
            cache,
            key=welcome.hash_key,
            namespace=welcome.namespace_digest,
            plans=sources.plan,
            is_writer=config.is_storage_writer,
        )

    def close(self) -> None:
        """Give back what is held; SGLang calls it when a storage is detached."""
        self._open.close()
        self._pages = None

    def batch_exists(
        self, keys: list[str], extra_info: HiCacheStorageExtraInfo | None = None
    ) -> int:
        """See `HiCacheStorage`: length of the leading run."""
        return self._pages.count_leading(keys, _before(extra_info)) if self._pages else 0

    def batch_get_v1(
        self,
        keys: list[str],
        host_indices: torch.Tensor,
        extra_info: HiCacheStorageExtraInfo | None = None,
    ) -> list[bool]:
        """See `HiCacheStorage`."""
        if self._pages is None:
            return [False] * len(keys)
        return self._pages.get(keys, host_indices, self.mem_pool_host)

    def batch_set_v1(
        self,
        keys: list[str],
        host_indices: torch.Tensor,
        extra_info: HiCacheStorageExtraInfo | None = None,
    ) -> list[bool]:
        """See `HiCacheStorage`."""
        if self._pages is None:
            return [False] * len(keys)
        return self._pages.set(keys, host_indices, self.mem_pool_host, _before(extra_info))

    def exists(self, key: str) -> bool:
        """See `HiCacheStorage`."""
        return self.batch_exists([key]) == 1

    def get(self, key: str, *_: object, **__: object) -> None:
        """The interface before v1 knows no chains: always a miss."""
        return

    def batch_get(self, keys: list[str], *_: object, **__: object) -> list[None]:
        """See `get`."""
        return [None] * len(keys)

    def set(self, key: str, *_: object, **__: object) -> bool:
        """See `get`: nothing is kept."""
        return False

    def batch_set(self, keys: list[str], *_: object, **__: object) -> bool:
        """See `get`: nothing is kept."""
        return False


def _before(info: HiCacheStorageExtraInfo | None) -> list[str]:
    """Keys of the pages before those of a call, from the root on."""
    return (info.prefix_keys if info else None) or []
