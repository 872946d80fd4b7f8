"""What a node has done and how it stands: counters and recent outcomes.

One snapshot of plain numbers and names feeds the node's record in the index, `/status` and
`/metrics` alike. Must not know HTTP.
"""

from collections import Counter, deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from prefixfleet.store.records import Outcome
from prefixfleet.store.ssd import COUNTERS
from prefixfleet.transfer.pull import PullResult

KEPT_OUTCOMES = 256
NAME_DIGITS = 8
"""Of a namespace's digest, by which metrics, status and logs call it."""
MAX_REASONS = 32
"""Labels of failures are kept to so many, whatever peers answer."""
OTHER_REASON = "other"
DISK_COUNTERS = ("promoted_blocks", "passed_blocks", "not_worth_blocks", "refused_busy")
"""Of the daemon's own dealings with the disk tier; `COUNTERS` are those of the tier itself."""


@dataclass(slots=True)
class NodeStats:
    """Counters of one life of a daemon. Owned by its event loop."""

    requests: int = 0
    blocks: Counter[str] = field(default_factory=Counter)  # by where they came from
    pulls: int = 0
    pulled_bytes: int = 0
    failures: Counter[str] = field(default_factory=Counter)  # by reason
    refused_hints: int = 0  # of no pool here, or of one that ends
    refused_wishes: int = 0
    outcomes: deque[Outcome] = field(default_factory=lambda: deque(maxlen=KEPT_OUTCOMES))

    def saw_outcome(self, outcome: Outcome) -> None:
        """An engine says what became of a request's prefix."""
        self.requests += 1
        self.outcomes.append(outcome)
        reused = outcome.engine_blocks + outcome.local_blocks + outcome.pulled_blocks
        self.blocks["engine"] += outcome.engine_blocks
        self.blocks["local"] += outcome.local_blocks
        self.blocks["pulled"] += outcome.pulled_blocks
        self.blocks["recomputed"] += max(0, outcome.prompt_blocks - reused)

    def saw_pull(self, pulled: PullResult) -> None:
        """A pull of this node ended."""
        self.pulls += 1
        self.pulled_bytes += pulled.bytes
        if pulled.failure:
            known = pulled.failure in self.failures or len(self.failures) < MAX_REASONS
            self.failures[pulled.failure if known else OTHER_REASON] += 1

    def numbers(self) -> dict[str, Any]:
        """The counters, for the node's record."""
        return {
            "requests": self.requests,
            "blocks": dict(self.blocks),
            "pulls": self.pulls,
            "pulled_bytes": self.pulled_bytes,
            "pull_failures": dict(self.failures),
            "refused_hints": self.refused_hints,
            "refused_wishes": self.refused_wishes,
        }


def render_metrics(snapshot: dict[str, Any]) -> bytes:
    """A node's snapshot as Prometheus text."""
    registry = CollectorRegistry()
    registry.register(_Collector(snapshot))
    return generate_latest(registry)


class _Collector:
    def __init__(self, snapshot: dict[str, Any]) -> None:
        self._snapshot = snapshot

    def describe(self) -> list[Metric]:
        return []

    def collect(self) -> Iterator[Metric]:
        stats = self._snapshot
        counters, index = stats["counters"], stats["index"]
        yield _labelled("slots", "Slots of the pool", "state", stats["tiers"].get("dram", {}))
        yield from _disk(stats["tiers"].get("ssd"), stats["disk"])
        yield from _kinds(stats["kinds"])
        yield _counted("blocks", "Prompt blocks by origin", "origin", counters["blocks"])
        yield _counted("pull_failures", "Failed pulls", "reason", counters["pull_failures"])
        failed = counters["failed_sources"]
        yield _counted("failed_sources", "Sources that failed in a pull", "reason", failed)
        stuck = stats["stuck_links"]
        yield _labelled("stuck_links", "Connections that do not close", "link", stuck)
        yield _counted("served", "Questions of peers", "outcome", stats["served"])
        yield _sessions(stats["sessions"])
        for name, text in (
            ("pulls", "Pulls"),
            ("pulled_bytes", "Bytes pulled from peers"),
            ("probes", "Reads that measured a link"),
            ("ended_kinds", "Namespaces that have no engine and no place here any more"),
            ("ended_wished_blocks", "Blocks that were to be kept when their namespaces ended"),
            ("refused_hints", "Hints of routers for namespaces that are not here, or end"),
            ("refused_wishes", "Wishes to keep blocks of namespaces that are not here, or end"),
        ):
            yield CounterMetricFamily(f"prefixfleet_node_{name}", text, value=counters[name])
        for name in ("committed_blocks", "evicted_blocks", "pool_full", "not_admitted_blocks"):
            yield CounterMetricFamily(
                f"prefixfleet_node_{name}", name.replace("_", " "), value=stats["cache"][name]
            )
        for name, text in (("read", "be in the pool"), ("copy", "be copied into its engine")):
            yield GaugeMetricFamily(
                f"prefixfleet_node_hit_block_{name}_seconds",
                f"Seconds that a block of this node takes to {text}, on average",
                value=stats["hits"][f"{name}_s"],
            )
        for name in ("epoch", "pending_blocks"):
            yield GaugeMetricFamily(
                f"prefixfleet_node_{name}", name.replace("_", " "), value=index[name]
            )
        yield GaugeMetricFamily(
            "prefixfleet_node_engines", "Engines that use the pool", value=stats["engines"]
        )
        yield GaugeMetricFamily(
            "prefixfleet_node_degraded", "Degraded modes now", value=len(stats["degraded"])
        )


def _disk(tier: dict[str, Any] | None, disk: dict[str, Any]) -> Iterator[Metric]:
    """The disk tier: gauges of its slots and bytes, counters of what was done."""
    if disk:
        for name, text in (
            ("cap_bytes", "Disk tier: what all its files may take"),
            ("held_bytes", "Disk tier: what all its files take"),
        ):
            yield GaugeMetricFamily(f"prefixfleet_node_ssd_{name}", text, value=disk[name])
        yield GaugeMetricFamily(
            "prefixfleet_node_ssd_unopened_bytes",
            "Disk tier: files of namespaces without a pool: no engine came yet, or for long",
            value=sum(disk["unopened"].values()),
        )
        yield CounterMetricFamily(
            "prefixfleet_node_ssd_given_files",
            "Disk tier: files that one namespace gave to another",
            value=disk["given_files"],
        )
    if not tier:
        return
    for name in ("slots", "resident", "pinned", "waiting_blocks"):
        yield GaugeMetricFamily(
            f"prefixfleet_node_ssd_{name}", f"Disk tier: {name}", value=tier[name]
        )
    yield GaugeMetricFamily(
        "prefixfleet_node_ssd_wear_left",
        "Disk tier: part of the wear budget that is left, 1 without a limit",
        value=tier["wear_left"],
    )
    for name in (*COUNTERS, *DISK_COUNTERS):
        yield CounterMetricFamily(
            f"prefixfleet_node_ssd_{name}", f"Disk tier: {name}", value=tier[name]
        )


def _kinds(kinds: dict[str, dict[str, Any]]) -> Iterator[Metric]:
    """By namespace, of which a node takes a bounded number; its label is the name in logs."""
    of = {digest[:NAME_DIGITS]: kind for digest, kind in kinds.items()}
    for name, text in (
        ("slots", "Slots of a namespace"),
        ("bytes", "Memory that a namespace has"),
        ("waste_bytes", "Of this memory what no slot uses"),
        ("disk_blocks", "Blocks of a namespace on disk"),
        ("disk_bytes", "What its files take of the disk"),
    ):
        yield _labelled(f"kind_{name}", text, "kind", {k: of[k][name] for k in of})
    for name, text in (
        ("asked_blocks", "Blocks that requests asked for"),
        ("found_blocks", "Blocks that requests found on this node"),
    ):
        yield _counted(f"kind_{name}", text, "kind", {k: of[k][name] for k in of})


def _sessions(links: dict[str, dict[str, int]]) -> Metric:
    """The listening side: reasons are those of our own errors, so that labels are bounded."""
    metric = CounterMetricFamily(
        "prefixfleet_node_sessions",
        "Connections of peers that ended, and what was refused to them",
        labels=["link", "reason"],
    )
    for link, reasons in links.items():
        for reason, count in reasons.items():
            metric.add_metric([link, reason], count)
    return metric


def _labelled(name: str, text: str, label: str, values: dict[str, float]) -> Metric:
    metric = GaugeMetricFamily(f"prefixfleet_node_{name}", text, labels=[label])
    for key, value in values.items():
        metric.add_metric([key], value)
    return metric


def _counted(name: str, text: str, label: str, values: dict[str, float]) -> Metric:
    metric = CounterMetricFamily(f"prefixfleet_node_{name}", text, labels=[label])
    for key, value in values.items():
        metric.add_metric([key], value)
    return metric
