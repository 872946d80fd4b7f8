"""What the chart's schema refuses, and that it says where and why."""

import pytest
import yaml
from helm_chart import CHART, EXAMPLES, template

ONE_NODE = CHART / "examples/one-node.yaml"
GROUP = yaml.safe_load(ONE_NODE.read_text())["fleet"]["groups"][0]


def _group(**change):
    return {"fleet__groups": [GROUP | change]}


@pytest.mark.parametrize(
    ("values", "complaint"),
    [
        ({"routr": {}}, "'routr' not allowed"),
        ({"router__replica": 2}, "'replica' not allowed"),
        ({"router__replicas": 0}, "minimum: got 0, want 1"),
        ({"router__replicas": "two"}, "got string, want integer"),
        ({"router__port": 80}, "minimum: got 80, want 1,024"),
        ({"router__service__type": "Ingress"}, "must be one of"),
        ({"router__disruptionBudget__minAvailable": 1}, "maxProperties: got 2, want 1"),
        ({"router__ingress__enabled": True}, "minItems: got 0, want 1"),
        ({"router__httpRoute__enabled": True}, "minItems: got 0, want 1"),
        ({"router__settings": {"ttft_slo": 1}}, "'ttft_slo' not allowed"),
        ({"router__settings": {"ttft_slo_s": -1}}, "minimum: got -1, want 0"),
        ({"router__settings": {"port": 1}}, "'port' not allowed"),
        (_group(workerSettings={"kv_cache_bytes": "1Gi"}), "got string, want integer"),
        (_group(nodeSettings={"link": "rdma"}), "must be one of"),
        ({"fleetName": "Prod"}, "'Prod' does not match pattern"),
        ({"image__tag": "latest"}, "'not' failed"),
        ({"image__redis": "valkey/valkey"}, "does not match pattern"),
        ({"secretName": ""}, "minLength: got 0, want 1"),
        ({"redis__caSecret": {"name": "ca"}}, "missing property 'key'"),
        ({"fleet__kind": "Deployment"}, "must be one of"),
        ({"fleet__headRestart__redisAddress": "redis://a:1"}, "does not match pattern"),
        (_group(memoryGiB="64Gi"), "got string, want integer"),
        (_group(dramGiB=0), "minimum: got 0, want 1"),
        (_group(name="GPU_1"), "does not match pattern"),
        (_group(rdma={"enabld": True}), "'enabld' not allowed"),
        (_group(ssd={"sizeGiB": 1, "hostPath": "/a", "storageClassName": "b"}), "'not' failed"),
        (_group(ssd={"sizeGiB": 1, "hostPath": "nvme"}), "does not match pattern"),
        (_group(gpus=8, engines=8, workerSettings={"tensor_parallel": 4}), "take 32 GPUs"),
        (_group(gpus=6, workerSettings={"tensor_parallel": 4}), "its pod has 6"),
        (_group(workerSettings={"engine_options": ["--seed"]}), "got array, want string"),
        ({"monitoring__serviceMonitor__interval": 15}, "got number, want string"),
    ],
    ids=str,
)
def test_a_wrong_value_is_refused_with_its_place_and_what_was_expected(values, complaint):
    refused = template(ONE_NODE, check=False, **values)

    assert refused.returncode != 0
    assert complaint in refused.stderr
    place = "/".join(next(iter(values)).split("__")[:-1])
    assert place in refused.stderr.replace(".", "/")


def test_a_group_without_its_sizes_is_refused():
    refused = template(check=False, fleet__groups=[{"name": "gpu", "replicas": 1}])

    assert "missing properties 'model', 'cpus', 'memoryGiB', 'dramGiB'" in refused.stderr


def test_rays_state_needs_a_redis_of_its_own():
    """The index may lose entries; Ray's state may not."""
    refused = template(
        ONE_NODE,
        check=False,
        redis__bundled=False,
        fleet__headRestart__enabled=True,
        fleet__kind="RayCluster",
    )

    assert "fleet.headRestart.redisAddress: expected host:port" in refused.stderr


def test_every_case_that_users_ask_for_has_an_example():
    assert {path.stem for path in EXAMPLES} == {
        "one-node",
        "h100-infiniband",
        "roce",
        "efa",
        "several-models",
        "external-redis",
        "no-gpu",
    }
