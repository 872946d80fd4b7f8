"""The connector's counts, from the scheduler to Prometheus."""

import prometheus_client
import pytest
from engine_rig import BLOCK, answer, prompt_of

from prefixfleet.cluster.connector_metrics import COUNTERS, ConnectorMetrics, ConnectorStats


@pytest.fixture
def exported():
    """Metrics of a registry of their own: (what observes, name -> value)."""
    registry = prometheus_client.CollectorRegistry()

    def counter(name, text, labelnames):
        return prometheus_client.Counter(name, text, labelnames, registry=registry)

    types = {prometheus_client.Counter: counter, prometheus_client.Gauge: None}
    metrics = ConnectorMetrics(
        SimpleConfig, types | {prometheus_client.Histogram: None}, ["engine"], {0: ["e"]}
    )

    def value(name):
        labels = {"engine": "e"}
        return registry.get_sample_value(f"prefixfleet_connector_{name}_total", labels)

    return metrics, value


class SimpleConfig:
    kv_transfer_config = None


def test_what_an_engine_counts_is_exported(start, exported):
    metrics, value = exported
    prompt = prompt_of(4 * BLOCK + 1)
    answer(start(), "a", prompt)
    rig = start()
    answer(rig, "b", prompt)

    metrics.observe(dict(rig.counts))
    metrics.observe({"loaded_blocks": 2})

    assert (value("loaded_blocks"), value("failed_loads")) == (6, 0)
    assert value("load_seconds") == rig.counts["load_seconds"] > 0
    assert set(rig.counts) <= set(COUNTERS)


def test_what_copying_takes_is_told_to_the_node(start, daemons):
    prompt = prompt_of(4 * BLOCK + 1)
    answer(start(), "a", prompt)
    rig = start()
    answer(rig, "b", prompt)
    daemons.wait_unused()

    hits = daemons.ask("a", lambda daemon: daemon.snapshot()["hits"])
    assert 0 < hits["copy_s"] <= rig.counts["load_seconds"] / 4  # it fades from then on


def test_counts_of_several_steps_add_up_for_the_log():
    total = ConnectorStats({"loaded_blocks": 2}).aggregate(
        ConnectorStats({"loaded_blocks": 1, "failed_loads": 1})
    )

    assert total.reduce() == {"loaded_blocks": 3, "failed_loads": 1}
    assert not total.is_empty()
    total.reset()
    assert total.is_empty()
