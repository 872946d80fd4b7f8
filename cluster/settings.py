"""Settings of the processes that `cluster/` starts: a node daemon's and a worker's.

Each is one frozen record, read from ``PREFIXFLEET_NODE_*`` or ``PREFIXFLEET_WORKER_*``; what the
whole fleet agrees on (name, Redis, secret) is `prefixfleet.store.settings.FleetSettings`.
"""

import re
import shlex
from pathlib import Path
from typing import ClassVar, Literal

from pydantic import Field, field_validator

from prefixfleet.store.orders import OrderName
from prefixfleet.store.settings import Section

NAME_PATTERN = r"^[a-z0-9][a-z0-9-]{0,39}$"
MAX_SOCKET_PATH_BYTES = 107
"""What the kernel takes as the path of a Unix socket."""

MAX_DRAIN_S = 3600
MAX_START_S = 4 * 3600
MAX_RANKS = 64

OUR_OPTIONS = frozenset(
    {
        *("--model", "--served-model-name", "--host", "--port", "--max-model-len"),
        *("--kv-cache-memory-bytes", "--kv-transfer-config", "--kv-events-config"),
        *("--tensor-parallel-size", "-tp", "--pipeline-parallel-size", "-pp"),
        *("--distributed-executor-backend", "--enable-prompt-tokens-details", "--config"),
    }
)
"""Of vLLM's options those that a worker sets itself, or that its blocks cannot follow."""

LinkName = Literal["auto", "shm", "ucx", "tcp"]
EncodingName = Literal["exact", "fp8-values", "int8-fp8", "int8", "fp8"]
"""The names in `kernels.encoding`, which this module must not import: it needs torch."""


def check_model(folder: Path) -> Path:
    """The folder, if a model is in it. Raises `ValueError` that says what is missing."""
    missing = [n for n in ("config.json", "tokenizer.json") if not (folder / n).is_file()]
    if missing:
        raise ValueError(
            f"got {str(folder)!r}, expected a folder with config.json, tokenizer.json and "
            f"safetensors files (no {', '.join(missing)} there)"
        )
    return folder


def _is_ours(word: str) -> bool:
    """Also a part of the name, which vLLM completes, a field of it (``--x.field``), and a file."""
    name = re.split("[=.]", word)[0].replace("_", "-")
    return bool(name.strip("-")) and any(option.startswith(name) for option in OUR_OPTIONS)


class NodeSettings(Section):
    """One node daemon: its name, where peers reach it, how much memory and disk it may take.

    Without ``ssd_path`` there is no disk tier; ``ssd_write_bytes_per_day`` 0 is no limit.
    """

    section: ClassVar[str] = "NODE_"

    name: str = Field(pattern=NAME_PATTERN)
    runtime_dir: Path
    host: str = Field(default="127.0.0.1", min_length=1)
    port: int = Field(default=0, ge=0, le=65535)
    pool_bytes: int = Field(default=1 << 30, ge=1 << 20)
    link: LinkName = "auto"
    collective: Literal["off", "observe", "enforce"] = "off"
    collective_device: str = Field(default="", pattern=r"^(cuda:\d+)?$")  # broadcasts by NCCL
    eviction: OrderName = "value"  # of the pool in memory; the disk is least recently used
    ssd_path: Path | None = None
    ssd_bytes: int = Field(default=16 << 30, ge=1 << 20)
    ssd_write_bytes_per_day: int = Field(default=0, ge=0)  # an hour of it, or a block, at once
    ssd_admission: Literal["reused", "all"] = "reused"  # what a full disk takes; see DESIGN 12
    ssd_key_file: Path | None = None  # 64 hex digits: blocks on disk are AES-256-GCM by it

    @field_validator("ssd_path")
    @classmethod
    def _absolute(cls, folder: Path | None) -> Path | None:
        if folder is not None and not folder.is_absolute():
            raise ValueError(f"got {str(folder)!r}, expected an absolute path")
        return folder

    @field_validator("runtime_dir")
    @classmethod
    def _short_enough(cls, folder: Path) -> Path:
        longest = folder / f"{'n' * 40}.sock"
        if not folder.is_absolute() or len(bytes(longest)) > MAX_SOCKET_PATH_BYTES:
            raise ValueError(
                f"got {str(folder)!r}, expected an absolute path of at most "
                f"{MAX_SOCKET_PATH_BYTES - 46} bytes: Unix sockets are made in it"
            )
        return folder

    @property
    def socket_path(self) -> Path:
        """Where engines of this node connect."""
        return self.runtime_dir / f"{self.name}.sock"


class TrtllmSettings(Section):
    """A TensorRT-LLM engine that keeps its blocks in a node's pool: where the node's daemon is."""

    section: ClassVar[str] = "TRTLLM_"

    socket_path: Path


class WorkerSettings(Section):
    """One engine: which model it serves, for which node, and how much memory and CPU it takes.

    ``kv_cache_bytes``, of each rank: 0 is what the engine finds free on a GPU, and 512 MiB on a
    CPU. ``engine_options`` are further words of vLLM's command line, quoted as in a shell.
    """

    section: ClassVar[str] = "WORKER_"

    name: str = Field(pattern=NAME_PATTERN)
    node: str = Field(pattern=NAME_PATTERN)
    model: Path
    socket_path: Path
    log_file: Path
    served_name: str = ""
    host: str = Field(default="127.0.0.1", min_length=1)
    port: int = Field(default=0, ge=0, le=65535)
    kv_cache_bytes: int = Field(default=0, ge=0)  # a rank's; 0: what a GPU has free, else 512 MiB
    max_model_tokens: int = Field(default=4096, ge=64)
    tensor_parallel: int = Field(default=1, ge=1, le=MAX_RANKS)
    engine_options: str = ""  # more words of vLLM's command line; those that we set are refused
    cpu_cores: str = Field(default="", pattern=r"^([0-9]+(,[0-9]+)*)?$")
    start_s: float = Field(default=1800, gt=0, le=MAX_START_S)  # until it serves, else it failed
    drain_s: float = Field(default=30, ge=0, le=MAX_DRAIN_S)
    rollout: int = Field(default=0, ge=0)
    encoding: EncodingName = "exact"  # of stored blocks; engines share those of their own only

    @field_validator("model")
    @classmethod
    def _is_a_model(cls, folder: Path) -> Path:
        return check_model(folder)

    @field_validator("kv_cache_bytes")
    @classmethod
    def _some_blocks(cls, count: int) -> int:
        if 0 < count < 1 << 20:
            raise ValueError(f"got {count}, expected at least {1 << 20}, or 0 for the default")
        return count

    @field_validator("engine_options")
    @classmethod
    def _not_ours(cls, text: str) -> str:
        words = shlex.split(text)  # raises ValueError for a quotation that does not end
        if ours := [word for word in words if _is_ours(word)]:
            raise ValueError(
                f"got {', '.join(ours)}, which prefixfleet sets, or which may stand for what it "
                "sets; expected other options of vLLM, by their whole names"
            )
        return text

    @property
    def model_name(self) -> str:
        """The name clients ask for: ``served_name``, or the folder's own name."""
        return self.served_name or self.model.name
