"""Records of workers that nobody runs: decisions look at nothing else of them."""

from dataclasses import asdict
from typing import Any

from upstreams import NAMESPACE

from prefixfleet.store.records import WorkerRecord


def worker_record(number: int, **changes: Any) -> WorkerRecord:
    """Of worker ``w<number>`` on node ``n<number>``."""
    fields: dict[str, Any] = {
        "worker": f"w{number}",
        "node": f"n{number}",
        "url": "http://127.0.0.1:1",
        "model": "tiny",
        "model_path": "",
        "namespace": asdict(NAMESPACE),
        "block_bytes": 1_000,
        "max_model_tokens": 10_000,
        "prefill_tokens_per_s": 1_000.0,
    }
    return WorkerRecord(**fields | changes)
