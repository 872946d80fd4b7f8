"""Alerts and dashboard ask for metrics that exist, and every alert says what to do."""

import ast
import json
import re
from collections import Counter as CountOf
from collections import defaultdict
from pathlib import Path

import promql_parser
import pytest
import yaml
from helm_chart import CHART, objects, of_kind
from prometheus_client.metrics import MetricWrapperBase
from prometheus_client.parser import text_string_to_metric_families

from prefixfleet.cluster.node_stats import render_metrics
from prefixfleet.router import metrics
from prefixfleet.router.metrics import Metrics

RULES = yaml.safe_load((CHART / "dashboards/alerts.yaml").read_text())["groups"][0]["rules"]
DASHBOARD = json.loads((CHART / "dashboards/grafana.json").read_text())
PANELS = [panel for panel in DASHBOARD["panels"] if panel["type"] != "row"]
TARGETS = [(p["title"], target["expr"]) for p in PANELS for target in p["targets"]]
FROM_PROMETHEUS = {"pod", "namespace", "instance", "job", "le"}
SUFFIXES = {"counter": ("_total",), "gauge": ("",), "histogram": ("_bucket", "_sum", "_count")}


@pytest.fixture(scope="module")
def known():
    """Name of each sample that a router or a node gives, with its labels."""
    found = {}
    for metric in vars(Metrics()).values():
        if isinstance(metric, MetricWrapperBase):
            for suffix in SUFFIXES[metric._type or ""]:
                found[metric._name + suffix] = set(metric._labelnames)
    for family in text_string_to_metric_families(render_metrics(_node_snapshot()).decode()):
        for sample in family.samples:
            found[sample.name] = set(sample.labels)
    return found


def test_nobody_asks_for_a_metric_of_the_router_that_nobody_counts():
    used = CountOf(
        node.attr
        for path in Path(metrics.__file__).parent.glob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load)
    )
    ours = [n for n, m in vars(Metrics()).items() if isinstance(m, MetricWrapperBase)]

    assert ours
    assert [name for name in ours if not used[name]] == []


def _node_snapshot():
    numbers = {"a": 1}
    return {
        "tiers": {"dram": numbers},
        "kinds": {"00": defaultdict(int)},
        "disk": defaultdict(int, unopened=numbers),
        "counters": defaultdict(int, blocks=numbers, pull_failures=numbers, failed_sources=numbers),
        "index": defaultdict(int),
        "cache": defaultdict(int),
        "hits": defaultdict(float),
        "stuck_links": numbers,
        "served": numbers,
        "sessions": {"tcp": numbers},
        "engines": 1,
        "degraded": [],
    }


def _selectors(expression):
    found = []

    def visit(part):
        if isinstance(part, promql_parser.VectorSelector):
            found.append(part)

    ready = expression.replace("$__rate_interval", "5m")
    promql_parser.walk(promql_parser.parse(ready), visit)
    return found


def _grouped_by(expression):
    groups = re.findall(r"\bby \(([^)]*)\)", expression)
    return {label.strip() for group in groups for label in group.split(",")}


@pytest.mark.parametrize(
    ("what", "expression"), [(r["alert"], r["expr"]) for r in RULES] + TARGETS, ids=str
)
def test_every_question_to_prometheus_is_about_a_metric_we_have(known, what, expression):
    selectors = _selectors(expression)

    assert selectors, what
    labels = FROM_PROMETHEUS.union(*(known[s.name] for s in selectors))
    assert _grouped_by(expression) <= labels
    for selector in selectors:
        asked = {matcher.name for matcher in selector.matchers.matchers}
        assert asked <= known[selector.name] | FROM_PROMETHEUS


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule["alert"])
def test_every_alert_leads_to_a_section_of_the_runbook(rule):
    headings = re.findall(r"^#+ (.*)$", (CHART / "RUNBOOK.md").read_text(), re.MULTILINE)
    anchors = {re.sub(r"[^a-z0-9 -]", "", h.lower()).replace(" ", "-") for h in headings}

    file, _, anchor = rule["annotations"]["runbook"].partition("#")

    assert file == "RUNBOOK.md"
    assert anchor in anchors
    assert rule["labels"]["severity"] in ("critical", "warning")
    assert rule["annotations"]["summary"].endswith(".")


def test_every_alert_of_the_runbook_exists():
    named = set(re.findall(r"\bPrefixfleet[A-Z]\w+", (CHART / "RUNBOOK.md").read_text()))

    assert named == {rule["alert"] for rule in RULES}


def test_the_chart_carries_both_unchanged():
    manifests = objects(
        monitoring__prometheusRule__enabled=True, monitoring__dashboard__enabled=True
    )

    rule = of_kind(manifests, "PrometheusRule")
    dashboard = of_kind(manifests, "ConfigMap", "dashboard")

    assert rule["spec"]["groups"][0]["rules"] == RULES
    assert json.loads(dashboard["data"]["prefixfleet.json"]) == DASHBOARD
    assert dashboard["metadata"]["labels"]["grafana_dashboard"] == "1"


def test_panels_have_ids_units_and_places_of_their_own():
    ids = [panel["id"] for panel in DASHBOARD["panels"]]
    places = [tuple(sorted(panel["gridPos"].items())) for panel in DASHBOARD["panels"]]

    assert len(set(ids)) == len(ids)
    assert len(set(places)) == len(places)
    assert all(panel["fieldConfig"]["defaults"]["unit"] for panel in PANELS)
