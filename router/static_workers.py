"""Workers from a file: plain vLLM, SGLang and TensorRT-LLM servers that run without our connector.

They are routed like any other, but what they hold is told by their own KV events, and no node of
ours pulls from them. vLLM servers with its own P2P tier pull from each other where the router says
so. Each of them is a node of its own, ``static:NAME``.
"""

import logging
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Literal

import msgspec

from prefixfleet.router.watched_file import WatchedFile
from prefixfleet.store.namespace import Namespace
from prefixfleet.store.records import WorkerRecord

SETTING = "PREFIXFLEET_ROUTER_WORKERS_FILE"
Name = Annotated[str, msgspec.Meta(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,62}$")]
Url = Annotated[str, msgspec.Meta(pattern=r"^https?://[^/\s]+")]
Address = Annotated[str, msgspec.Meta(pattern=r"^([^/\s:]+:[0-9]{1,5})?$")]
Endpoint = Annotated[str, msgspec.Meta(pattern=r"^(tcp://[^/\s]+:[0-9]+)?$")]
Events = Annotated[str, msgspec.Meta(pattern=r"^((tcp|https?)://[^/\s]+:[0-9]+)?$")]

log = logging.getLogger(__name__)


class StaticWorker(
    msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True, omit_defaults=True
):
    """One entry of the file.

    ``events`` and ``replay`` are the endpoints of ``--kv-events-config``, as the router reaches
    them; of ``trtllm`` the server whose ``/kv_cache_events`` is polled, http://host:port. Without
    ``events`` the worker is routed by load and by what was just sent there.
    ``p2p`` is the address of vLLM's P2P tier as the other engines reach it; what it holds must be
    known by ``events``, and what a pull costs by ``block_bytes``, the size of a block's KV.
    ``block_tokens`` is the engine's block size. A speed of 0 is measured when the worker joins.
    """

    name: Name
    url: Url
    model: Annotated[str, msgspec.Meta(min_length=1)]
    model_path: Annotated[str, msgspec.Meta(min_length=1)]
    engine: Literal["vllm", "sglang", "trtllm"] = "vllm"
    events: Events = ""
    replay: Endpoint = ""
    p2p: Address = ""
    block_bytes: Annotated[int, msgspec.Meta(ge=0)] = 0
    block_tokens: Annotated[int, msgspec.Meta(ge=1, le=4_096)] = 16
    max_model_tokens: Annotated[int, msgspec.Meta(ge=0)] = 0
    prefill_tokens_per_s: Annotated[float, msgspec.Meta(ge=0)] = 0.0

    def __post_init__(self) -> None:
        if self.p2p and not (self.events and self.block_bytes and self.engine == "vllm"):
            raise ValueError("p2p is vLLM's, and needs 'events' and 'block_bytes' beside it")
        polled = self.engine == "trtllm"
        if self.events and polled == self.events.startswith("tcp://"):
            raise ValueError(
                f"events of {self.engine}: got {self.events!r}, expected "
                + ("http://host:port of the server" if polled else "tcp://host:port")
            )
        if polled and self.replay:
            raise ValueError("replay: TensorRT-LLM replays no events, leave it out")

    @property
    def node(self) -> str:
        """What stands in a node's place for it."""
        return f"static:{self.name}"

    def namespace(self) -> Namespace:
        """Equal for engines that see equal chains. Their bytes are never exchanged."""
        return Namespace(
            model=self.model,
            weights="unknown",
            dtype="unknown",
            block_tokens=self.block_tokens,
            layout="none",
            engine=f"static-{self.engine}",
            isa="any",
            tensor_parallel=1,
        )

    def record(self) -> WorkerRecord:
        """The worker as if it had registered itself."""
        return WorkerRecord(
            worker=self.name,
            node=self.node,
            url=self.url.rstrip("/"),
            model=self.model,
            model_path=self.model_path,
            namespace=asdict(self.namespace()),
            block_bytes=self.block_bytes,
            max_model_tokens=self.max_model_tokens,
            prefill_tokens_per_s=self.prefill_tokens_per_s,
        )


def remote_kv_source(p2p: str, request: str) -> dict[str, object]:
    """What tells vLLM (0.32, ``v1/kv_offload/tiering/p2p``) to look for a prompt's blocks in the
    P2P tier of the engine at ``p2p``; it asks there what there is, and computes the rest."""
    host, _, port = p2p.rpartition(":")
    source = {"kv_request_id": request, "remote_host": host, "remote_port": int(port)}
    return {"remote_kv_source": source}


class _File(msgspec.Struct, forbid_unknown_fields=True):
    workers: list[StaticWorker]


class StaticWorkers:
    """Owned by the router's event loop. Without a file there are none."""

    def __init__(self, path: Path | None) -> None:
        self._file = WatchedFile(SETTING, path) if path else None
        self._by_name: dict[str, StaticWorker] = {}

    @property
    def by_name(self) -> Mapping[str, StaticWorker]:
        """Every entry."""
        return self._by_name

    def records(self) -> list[WorkerRecord]:
        """Every entry as a worker's record."""
        return [entry.record() for entry in self._by_name.values()]

    def load(self) -> None:
        """Read the file. Raises `ConfigError` if it is absent or wrong; what was read stays."""
        if self._file is None:
            return
        entries = self._file.read(_File).workers
        by_name = {entry.name: entry for entry in entries}
        if len(by_name) != len(entries):
            raise self._file.error("a name is there twice")
        self._by_name = by_name
        self._file.accept()

    def reload_if_changed(self) -> None:
        """Read the file again if it is another one. Raises `ConfigError`, see `load`."""
        if self._file is not None and self._file.changed():
            self.load()
            log.info("%d static workers read from %s", len(self._by_name), self._file.path)
