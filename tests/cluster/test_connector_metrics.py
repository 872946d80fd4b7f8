"""The connector's counts, from the scheduler to Prometheus."""

import threading

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


def test_ranks_that_report_a_load_in_different_steps_copied_side_by_side(start, monkeypatch):
    prompt = prompt_of(4 * BLOCK + 1)
    answer(start(ranks=2), "a", prompt)
    rig = start(ranks=2)
    first, last = (rank.connector._worker for rank in rig.ranks)
    seconds, first_told = [], threading.Event()

    def hears_of(done, real):
        seconds.append(done.seconds)
        real(done)

    for worker in (first, last):
        real = worker._note_loaded
        monkeypatch.setattr(worker, "_note_loaded", lambda done, real=real: hears_of(done, real))
    load = last._copier._load
    monkeypatch.setattr(last._copier, "_load", lambda job: first_told.wait(60) and load(job))
    rig.add("b", prompt)
    while not seconds:
        rig.step()
    first_told.set()
    rig.run()

    assert len(seconds) == 2
    assert rig.counts["load_seconds"] == max(seconds) < sum(seconds)


def test_counts_of_several_steps_add_up_for_the_log():
    total = ConnectorStats({"loaded_blocks": 2}).aggregate(
        ConnectorStats({"loaded_blocks": 1, "failed_loads": 1})
    )

    assert total.reduce() == {"loaded_blocks": 3, "failed_loads": 1}
    assert not total.is_empty()
    total.reset()
    assert total.is_empty()
