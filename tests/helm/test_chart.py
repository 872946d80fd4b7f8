"""Every example is linted, rendered, held against schemas, and compared with its golden file."""

import gzip
import os
import re

import jsonschema
import pytest
import yaml
from helm_chart import (
    CHART,
    EXAMPLES,
    REPOSITORY,
    containers,
    helm,
    objects,
    of_kind,
    pod_templates,
    template,
)

GOLDEN = REPOSITORY / "tests/helm/golden"
CRDS = REPOSITORY.parent / "shared/schemas"
KUBERNETES = ("1.27", "1.30", "1.33", "1.37")
OTHERS = {
    "RayCluster": "its own schema, below",
    "HTTPRoute": "no schema in a package",
    "ServiceMonitor": "no schema in a package",
    "PodMonitor": "no schema in a package",
    "PrometheusRule": "no schema in a package",
}
each_example = pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: path.stem)
EVERYTHING = {
    "router__ingress": {"enabled": True, "hosts": ["a.example.com"]},
    "router__httpRoute": {"enabled": True, "parentRefs": [{"name": "gateway"}]},
    "router__autoscaling__enabled": True,
    "fleet__headRestart__enabled": True,
    "monitoring": {
        kind: {"enabled": True} for kind in ("serviceMonitor", "prometheusRule", "dashboard")
    },
    "networkPolicy__enabled": True,
    "extraObjects": [{"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "extra"}}],
}


@each_example
def test_helm_finds_nothing_to_complain_about(example):
    said = helm("lint", CHART, "--strict", "--values", example).stdout

    assert "[WARNING]" not in said
    assert "[ERROR]" not in said


@each_example
def test_rendered_manifests_are_the_golden_ones(example):
    """A change of the manifests is a change of somebody's cluster: it shows in the review.

    PREFIXFLEET_GOLDEN=write renders them anew.
    """
    golden = GOLDEN / example.name

    rendered = template(example).stdout

    if os.environ.get("PREFIXFLEET_GOLDEN") == "write":
        golden.write_text(rendered)
    assert rendered == golden.read_text()


def test_there_is_no_golden_file_without_an_example():
    assert {path.name for path in GOLDEN.iterdir()} == {path.name for path in EXAMPLES}


@pytest.mark.parametrize("version", KUBERNETES)
@each_example
def test_kubernetes_accepts_every_object(example, version):
    validate = pytest.importorskip("kubernetes_validate")

    for manifest in objects(example, **(EVERYTHING if example is EXAMPLES[0] else {})):
        if manifest["kind"] not in OTHERS:
            validate.validate(manifest, version, strict=True)


@each_example
def test_pod_templates_inside_a_raycluster_are_pods(example):
    """The CRD repeats the pod's schema of one version; the strict one knows misspelt fields."""
    validate = pytest.importorskip("kubernetes_validate")

    for name, pod in pod_templates(objects(example)):
        manifest = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "a"}, **pod}
        assert validate.validate(manifest | {"metadata": {"name": "a"}}, "1.37", strict=True), name


@each_example
def test_kuberay_accepts_the_raycluster(example):
    crd_file = CRDS / "ray.io_rayclusters.yaml.gz"
    if not crd_file.exists():
        pytest.skip(f"no {crd_file}: KubeRay's CRDs are not part of this repository")
    crd = yaml.safe_load(gzip.decompress(crd_file.read_bytes()))
    [schema] = [
        v["schema"]["openAPIV3Schema"] for v in crd["spec"]["versions"] if v["name"] == "v1"
    ]
    schema["properties"]["metadata"] = {"type": "object"}
    validator = jsonschema.Draft202012Validator(_closed(schema))

    for manifest in objects(example):
        if manifest["kind"] == "RayCluster":
            errors = [f"{e.json_path}: {e.message[:200]}" for e in validator.iter_errors(manifest)]
            assert errors == []


def _closed(schema):
    """Kubernetes' structural schema as JSON Schema that refuses unknown fields."""
    if isinstance(schema, list):
        return [_closed(part) for part in schema]
    if not isinstance(schema, dict):
        return schema
    closed = {key: _closed(value) for key, value in schema.items()}
    if closed.get("x-kubernetes-int-or-string"):
        return {"type": ["integer", "string"]}
    if closed.get("type") == "object" and isinstance(closed.get("properties"), dict):
        closed.setdefault("additionalProperties", False)
    return closed


@pytest.mark.parametrize("kind", ["RayCluster", "StatefulSet"])
def test_selectors_of_services_and_policies_find_their_pods(kind):
    manifests = objects(CHART / "examples/one-node.yaml", fleet__kind=kind, **EVERYTHING)
    pods = [pod["metadata"]["labels"] for _, pod in pod_templates(manifests)]

    wanted = [
        (
            m["kind"],
            m["metadata"]["name"],
            m["spec"].get("selector") or m["spec"].get("podSelector"),
        )
        for m in manifests
        if m["kind"] in ("Service", "NetworkPolicy", "PodDisruptionBudget", "ServiceMonitor")
    ]

    for what, name, selector in wanted:
        labels = selector.get("matchLabels", selector)
        if what == "Service" and name.endswith("-head") and kind == "RayCluster":
            continue
        assert any(labels.items() <= pod.items() for pod in pods), f"{what} {name} selects nothing"


@each_example
def test_no_container_runs_as_root_writes_to_its_root_or_gains_rights(example):
    for name, pod in pod_templates(objects(example)):
        assert pod["spec"]["securityContext"]["runAsNonRoot"], name
        assert not pod["spec"]["automountServiceAccountToken"], name
        for container in containers(pod):
            security = container["securityContext"]
            assert security["readOnlyRootFilesystem"], name
            assert security["allowPrivilegeEscalation"] is False, name
            assert security["capabilities"]["drop"] == ["ALL"], name


@each_example
def test_locked_memory_and_the_hosts_network_are_for_rdma_only(example):
    groups = {g["name"]: g for g in yaml.safe_load(example.read_text())["fleet"]["groups"]}

    for name, pod in pod_templates(objects(example)):
        group = next((g for key, g in groups.items() if name.endswith(key)), {})
        rdma = group.get("rdma", {}).get("enabled", False)
        on_host = rdma and group["rdma"].get("hostNetwork", True)
        added = {
            tuple(c["securityContext"]["capabilities"].get("add", ())) for c in containers(pod)
        }
        assert added == ({("IPC_LOCK",)} if rdma else {()}), name
        assert pod["spec"].get("hostNetwork", False) is on_host, name
        assert pod["spec"].get("hostIPC", False) is on_host, name


@each_example
def test_shared_memory_holds_the_dram_tier_and_the_pod_may_use_as_much(example):
    groups = yaml.safe_load(example.read_text())["fleet"]["groups"]
    pods = dict(pod_templates(objects(example)))

    for group in groups:
        [pod] = [pod for name, pod in pods.items() if name.endswith(group["name"])]
        [ray] = [c for c in pod["spec"]["containers"] if c["name"] == "ray"]
        [shm] = [v for v in pod["spec"]["volumes"] if v["name"] == "shm"]
        shm_gib = int(shm["emptyDir"]["sizeLimit"].removesuffix("Gi"))
        pool = next(e for e in ray["env"] if e["name"] == "PREFIXFLEET_NODE_POOL_BYTES")
        limit_gib = int(ray["resources"]["limits"]["memory"].removesuffix("Gi"))
        assert int(pool["value"]) == group["dramGiB"] << 30
        assert shm_gib > group["dramGiB"]
        assert limit_gib == group["memoryGiB"] + shm_gib


def test_a_stopping_router_serves_its_streams_before_it_is_killed():
    """The endpoint goes first, then the process, then the pod's patience ends."""
    manifests = objects(CHART / "examples/one-node.yaml", router__drainSeconds=90)
    pod = of_kind(manifests, "Deployment")["spec"]["template"]["spec"]

    [slept] = re.findall(r"\d+", str(pod["containers"][0]["lifecycle"]["preStop"]))

    assert int(slept) == 90
    assert pod["terminationGracePeriodSeconds"] > 90 + 10


def test_without_the_bundled_redis_there_is_none():
    """Its address is then a secret like any other."""
    manifests = objects(CHART / "examples/one-node.yaml", redis__bundled=False)

    rendered = yaml.safe_dump_all(manifests)

    assert "valkey" not in rendered
    assert "redis-password" not in rendered
    assert "key: redis-url" in rendered
