"""`ray up` with the cluster file we ship, on hosts made of namespaces: up, in use, down."""

import sys
from pathlib import Path

import netns
import pytest
import yaml

pytestmark = [
    pytest.mark.skipif(bool(netns.missing()), reason=f"namespace hosts: {netns.missing()}"),
    pytest.mark.timeout(300),
]

LAUNCH = [sys.executable, "-m", "prefixfleet.cluster.launch"]
SHIPPED = netns.REPOSITORY / "cluster/ray-cluster.yaml"
CLUSTER_FILE = Path("/root/cluster.yaml")
WHERE = """
import ray
ray.init("auto", log_to_driver=False)

@ray.remote(num_cpus=1, scheduling_strategy="SPREAD")
class Host:
    def address(self):
        import prefixfleet.store.chain
        return ray.util.get_node_ip_address()

hosts = [Host.remote() for _ in range(6)]
print("placed on", *sorted(set(ray.get([host.address.remote() for host in hosts]))))
"""


@pytest.fixture
def network(tmp_path):
    """An operator's machine, a head and two workers; this environment installed on each."""
    with netns.Network.of(tmp_path, "operator", "head", "worker1", "worker2") as network:
        network.serve_ssh(Path("/root/.ssh/key"))
        for host in network.hosts:
            venv = host.folder / "root/prefixfleet/venv"
            venv.parent.mkdir()
            venv.symlink_to(sys.prefix)
        settings = network["operator"].folder / "root/.prefixfleet"
        settings.mkdir()
        (settings / "ray-token").write_text("not-a-secret-" * 4)
        (settings / "fleet.env").write_text(
            "RAY_AUTH_MODE=token\nRAY_AUTH_TOKEN_PATH=$HOME/.prefixfleet/ray-token\n"
        )
        _write_cluster_file(network)
        yield network


def _write_cluster_file(network):
    cluster = yaml.safe_load(SHIPPED.read_text())
    workers = [network[name].address for name in ("worker1", "worker2")]
    cluster["provider"] |= {"head_ip": network["head"].address, "worker_ips": workers}
    cluster["auth"] = {"ssh_user": "root", "ssh_private_key": "/root/.ssh/key"}
    path = network["operator"].folder / CLUSTER_FILE.relative_to("/")
    path.write_text(yaml.safe_dump(cluster))


def _raylets(network):
    return [
        host.name
        for host in network.hosts
        if not host.run("pgrep", "raylet", check=False).returncode
    ]


def test_every_host_joins_takes_work_and_is_free_again_after_down(network):
    """Autoscaler v2 leaves out the last worker, and `ray down` leaves workers running."""
    operator, head = network["operator"], network["head"]

    up = operator.run(*LAUNCH, "up", CLUSTER_FILE, "--within", "150", timeout_s=160)
    joined = set(up.stdout.splitlines()[-1].split()[3:])
    placed = head.run("bash", "-ic", f"python - <<'END'\n{WHERE}\nEND", timeout_s=60).stdout
    stranger = head.run("env", f"{sys.prefix}/bin/ray", "status", check=False)
    down = operator.run(*LAUNCH, "down", CLUSTER_FILE, "--within", "60", timeout_s=120)

    assert joined == {"10.77.0.2", "10.77.0.3", "10.77.0.4"}
    assert placed.splitlines()[-1] == "placed on 10.77.0.2 10.77.0.3 10.77.0.4"
    assert stranger.returncode, "without the token nobody may use the cluster"
    assert "not stopped" not in down.stderr
    assert _raylets(network) == []


def test_a_host_without_ssh_is_named_before_anything_is_started(network):
    """`ray up` itself would retry for ever without a word."""
    operator, worker = network["operator"], network["worker2"]
    network.cut(worker)

    up = operator.run(*LAUNCH, "up", CLUSTER_FILE, timeout_s=60, check=False)

    assert up.returncode == 1
    assert f"root@{worker.address}" in up.stderr
    assert f"root@{network['worker1'].address}" not in up.stderr
    assert _raylets(network) == []
