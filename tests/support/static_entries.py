"""Entries of a workers file for fake engines."""

import json
from pathlib import Path
from typing import Any

from engine_publisher import EnginePublisher
from upstreams import NAMESPACE, FakeEngine


def entry(
    engine: FakeEngine, publisher: EnginePublisher | None = None, /, **fields: Any
) -> dict[str, Any]:
    return {
        "name": engine.name,
        "url": engine.url,
        "model": "tiny",
        "model_path": str(engine.folder),
        "block_tokens": NAMESPACE.block_tokens,
        "prefill_tokens_per_s": 1_000,
        "events": publisher.events if publisher else "",
        "replay": publisher.replay if publisher else "",
    } | fields


def write(path: Path, *entries: dict[str, Any]) -> Path:
    path.write_text(json.dumps({"workers": list(entries)}))
    return path
