"""Every example is linted, rendered, held against schemas, and compared with its golden file."""

import gzip
import json
import os
import re
from functools import cache
from pathlib import Path
from typing import Any

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
from referencing import Registry, Resource

GOLDEN = REPOSITORY / "tests/helm/golden"
CRDS = REPOSITORY.parent / "shared/schemas"
KUBERNETES = ("1.27", "1.32", "1.37")
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

    GOLDEN=write renders them anew.
    """
    golden = GOLDEN / example.name

    rendered = template(example).stdout

    if os.environ.get("GOLDEN") == "write":
        golden.write_text(rendered)
    assert rendered == golden.read_text()


def test_there_is_no_golden_file_without_an_example():
    assert {path.name for path in GOLDEN.iterdir()} == {path.name for path in EXAMPLES}


@pytest.mark.parametrize("version", KUBERNETES)
@each_example
def test_kubernetes_accepts_every_object(example, version):
    for manifest in objects(example):
        if manifest["kind"] not in OTHERS:
            assert _complaints(manifest, version) == []


@pytest.mark.parametrize("version", KUBERNETES)
def test_kubernetes_accepts_everything_at_once(version):
    for manifest in objects(EXAMPLES[0], **EVERYTHING):
        if manifest["kind"] not in OTHERS:
            assert _complaints(manifest, version) == []


def test_an_object_with_a_misspelt_field_would_not_pass():
    manifest = of_kind(objects(EXAMPLES[0]), "Deployment")
    manifest["spec"]["template"]["spec"]["nodeSelectr"] = {}

    assert "'nodeSelectr' was unexpected" in str(_complaints(manifest, KUBERNETES[-1]))


@each_example
def test_pod_templates_inside_a_raycluster_are_pods(example):
    """The CRD repeats the pod's schema of one version; the strict one knows misspelt fields."""
    for name, pod in pod_templates(objects(example)):
        manifest = {"apiVersion": "v1", "kind": "Pod", "spec": pod["spec"]}
        assert _complaints(manifest, KUBERNETES[-1]) == [], name


@each_example
def test_kuberay_accepts_the_raycluster(example):
    validator = _kuberay()

    for manifest in objects(example, fleet__kind="RayCluster"):
        if manifest["kind"] == "RayCluster":
            errors = [f"{e.json_path}: {e.message[:200]}" for e in validator.iter_errors(manifest)]
            assert errors == []


@cache
def _kuberay():
    """Validator of a RayCluster, from KubeRay's own definition of it."""
    crd_file = CRDS / "ray.io_rayclusters.yaml.gz"
    if not crd_file.exists():
        pytest.skip(f"no {crd_file}: KubeRay's CRDs are not part of this repository")
    crd = yaml.load(gzip.decompress(crd_file.read_bytes()), yaml.CSafeLoader)
    [schema] = [
        v["schema"]["openAPIV3Schema"] for v in crd["spec"]["versions"] if v["name"] == "v1"
    ]
    schema["properties"]["metadata"] = {"type": "object"}
    return jsonschema.Draft202012Validator(_closed(schema))


@cache
def _kubernetes(version):
    """Folder of a version's strict schemas, and its definitions, read once."""
    package = pytest.importorskip("kubernetes_validate")
    folder = Path(package.__file__).parent / f"kubernetes-json-schema/v{version}.0-local-strict"
    definitions = json.loads((folder / "_definitions.json").read_text())
    return folder, Resource.from_contents(definitions) @ Registry()


def _complaints(manifest, version):
    folder, registry = _kubernetes(version)
    group, _, name = manifest["apiVersion"].rpartition("/")
    kind = "-".join(filter(None, [manifest["kind"].lower(), group.split(".")[0], name]))
    schema = json.loads((folder / f"{kind}.json").read_text())
    validator = jsonschema.Draft202012Validator(schema, registry=registry)
    return [f"{e.json_path}: {e.message[:200]}" for e in validator.iter_errors(manifest)]


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
        scales = name.endswith(" head") and "maxReplicas" in example.read_text()
        assert pod["spec"]["automountServiceAccountToken"] is scales, name  # Ray's autoscaler
        for container in containers(pod):
            security = container["securityContext"]
            assert security["readOnlyRootFilesystem"], name
            assert security["allowPrivilegeEscalation"] is False, name
            assert security["capabilities"]["drop"] == ["ALL"], name


@each_example
def test_locked_memory_and_the_hosts_network_are_for_rdma_only(example):
    groups = {g["name"]: g for g in yaml.safe_load(example.read_text())["fleet"]["groups"]}

    for name, pod in pod_templates(objects(example)):
        group: dict[str, Any] = next((g for key, g in groups.items() if name.endswith(key)), {})
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
