"""What the connector counts, on the engine's own /metrics and in its log.

Counts travel from the scheduler half to the engine's front end as a plain map of names to
numbers since the last time.
"""

from collections import Counter
from typing import Any

import prometheus_client
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import (
    KVConnectorPromMetrics,
    KVConnectorStats,
)

COUNTERS = {
    "loaded_blocks": "Blocks copied from the node's pool into the engine",
    "load_seconds": "Seconds of copying blocks from the node's pool into the engine",
    "failed_loads": "Loads that brought fewer blocks than wanted; the rest was computed",
    "saved_blocks": "Blocks handed to the node's pool, those it had already among them",
    "dropped_blocks": "Blocks that could not be saved; a later miss",
    "requests_without_daemon": "Requests that arrived while the node daemon was away",
    "daemon_losses": "Times that the node daemon went away",
}


class ConnectorStats(KVConnectorStats):  # type: ignore[misc]
    """Counts since the last report; ``data`` maps names of `COUNTERS` to numbers."""

    def reset(self) -> None:
        """Begin to count anew."""
        self.data: dict[str, float] = {}

    def aggregate(self, other: KVConnectorStats) -> "ConnectorStats":
        """Both counts in one."""
        return ConnectorStats(dict(Counter(self.data) + Counter(other.data)))

    def reduce(self) -> dict[str, float]:
        """For the engine's log."""
        return dict(self.data)

    def is_empty(self) -> bool:
        """Whether nothing happened."""
        return not any(self.data.values())


class ConnectorMetrics(KVConnectorPromMetrics):  # type: ignore[misc]
    """The counters as Prometheus sees them, named ``prefixfleet_connector_*_total``."""

    def __init__(
        self,
        vllm_config: Any,  # noqa: ANN401 - vLLM's
        metric_types: dict[Any, Any],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> None:
        super().__init__(vllm_config, metric_types, labelnames, per_engine_labelvalues)
        kind = metric_types[prometheus_client.Counter]
        self._counters = {}  # each engine's from the start: a counter that is 0 says so
        for name, text in COUNTERS.items():
            counter = kind(f"prefixfleet_connector_{name}", text, labelnames=labelnames)
            for engine, values in per_engine_labelvalues.items():
                self._counters[engine, name] = counter.labels(*values)

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        """Add what one engine counted."""
        for name, count in transfer_stats_data.items():
            self._counters[engine_idx, name].inc(count)
