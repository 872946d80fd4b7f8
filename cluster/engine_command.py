"""How a vLLM server is started for a worker: its command line and its environment.

Pure; must not start anything. float32, eager mode and one CPU core an engine are what the CPU
build needs to answer the same with and without reuse; a GPU engine takes its model's own dtype.
"""

import json
import os
import shlex
import sys
from collections.abc import Mapping, Sequence
from importlib import metadata
from typing import Any

from prefixfleet.cluster.settings import WorkerSettings

BLOCK_TOKENS = 32
"""The CPU attention kernel takes multiples of 32 only; small blocks share more."""
CPU_SEQUENCES = 8
CPU_KV_CACHE_BYTES = 512 << 20
CONNECTOR = "PrefixfleetConnector"
CONNECTOR_MODULE = "prefixfleet.cluster.connector"


def engine_command(settings: WorkerSettings, port: int) -> list[str]:
    """Command of an OpenAI server on ``port`` whose KV connector talks to the node's daemon."""
    transfer = {
        "kv_connector": CONNECTOR,
        "kv_connector_module_path": CONNECTOR_MODULE,
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {
            "socket": str(settings.socket_path),
            "engine": settings.name,
            "encoding": settings.encoding,
        },
    }
    # the module and not `vllm serve`, which wants a distribution of the name "vllm"
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server"]
    options = {
        "--model": settings.model,
        "--served-model-name": settings.model_name,
        "--host": settings.host,
        "--port": port,
        "--max-model-len": settings.max_model_tokens,
        "--generation-config": "vllm",
        "--kv-transfer-config": json.dumps(transfer),
        "--kv-events-config": json.dumps(_events(settings)),
        **_sizes(settings, cpu=_is_cpu_build()),
    }
    for name, value in options.items():
        command += [name, str(value)]
    command += ["--enable-prompt-tokens-details", "--disable-uvicorn-access-log"]
    if _is_cpu_build():
        command += ["--dtype", "float32", "--enforce-eager", "--block-size", str(BLOCK_TOKENS)]
    return command + shlex.split(settings.engine_options)


def _sizes(settings: WorkerSettings, *, cpu: bool) -> dict[str, Any]:
    """What a GPU engine finds out itself, a CPU engine is told."""
    sizes: dict[str, Any] = {}
    if settings.kv_cache_bytes or cpu:
        sizes["--kv-cache-memory-bytes"] = settings.kv_cache_bytes or CPU_KV_CACHE_BYTES
    if cpu:
        sizes["--max-num-seqs"] = CPU_SEQUENCES
    if settings.tensor_parallel > 1:
        sizes["--tensor-parallel-size"] = settings.tensor_parallel
        sizes["--distributed-executor-backend"] = "mp"  # Ray places engines, not their ranks
    return sizes


def _events(settings: WorkerSettings) -> dict[str, Any]:
    """The engine's own KV events, on sockets that only this user reaches: they hold tokens."""
    place = settings.socket_path.parent / settings.name
    return {
        "enable_kv_cache_events": True,
        "publisher": "zmq",
        "endpoint": f"ipc://{place}.kve",
        "replay_endpoint": f"ipc://{place}.kvr",
    }


def engine_environ(settings: WorkerSettings, base: Mapping[str, str]) -> dict[str, str]:
    """Environment of the engine: ``base``, offline, without usage reports, without our settings
    and without what Ray sets for its own (one OpenMP thread, for example)."""
    environ = {n: v for n, v in base.items() if not n.startswith(("PREFIXFLEET_", "RAY_", "OMP_"))}
    environ |= {
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "DO_NOT_TRACK": "1",
        "VLLM_HOST_IP": settings.host,
    }
    if settings.cpu_cores:
        cores, ranks = settings.cpu_cores.split(","), settings.tensor_parallel
        shares = [cores_for(rank, ranks, cores) for rank in range(ranks)]
        environ["VLLM_CPU_OMP_THREADS_BIND"] = "|".join(shares)
    return environ


def cores_for(worker: int, workers: int, cores: Sequence[int | str]) -> str:
    """Cores of one of ``workers`` engines on a host, or ranks of an engine: an equal share, so that
    they don't collide.

    More of them than cores share them one by one.
    """
    share = len(cores) // workers
    if share == 0:
        return str(cores[worker % len(cores)])
    return ",".join(map(str, cores[worker * share : (worker + 1) * share]))


def usable_cores() -> list[int]:
    """CPU cores this process may run on."""
    return sorted(os.sched_getaffinity(0))


def _is_cpu_build() -> bool:
    try:
        metadata.version("vllm-cpu")
    except metadata.PackageNotFoundError:
        return False
    return True
