"""Reading a cluster file, and what is said when a cluster cannot be brought up."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from prefixfleet.cluster.launch import ClusterFile, up
from prefixfleet.store.errors import ConfigError

SHIPPED = Path(__file__).resolve().parents[2] / "cluster"
LOCAL = "provider: {type: local, head_ip: 127.0.0.1, worker_ips: []}\n"


def _file(tmp_path, text):
    path = tmp_path / "cluster.yaml"
    path.write_text(text)
    return path


def test_a_local_cluster_has_its_hosts_and_one_node_each():
    cluster = ClusterFile.read(SHIPPED / "ray-cluster.yaml")

    assert (cluster.head, cluster.workers) == ("192.0.2.10", ("192.0.2.11", "192.0.2.12"))
    assert cluster.nodes == 3


def test_a_cloud_cluster_is_complete_with_its_head_and_least_workers():
    cluster = ClusterFile.read(SHIPPED / "ray-cluster-aws.yaml")

    assert (cluster.head, cluster.workers) == ("", ())
    assert cluster.nodes == 3


def test_workers_are_reached_through_the_head_and_nobody_is_asked_for_a_password():
    cluster = ClusterFile.read(SHIPPED / "ray-cluster.yaml")

    to_head, to_worker = cluster.ssh("192.0.2.10", "true"), cluster.ssh("192.0.2.11", "true")

    assert not any("ProxyCommand" in word for word in to_head)
    assert any("-W %h:%p prefixfleet@192.0.2.10" in word for word in to_worker)
    assert {"BatchMode=yes", "ConnectTimeout=5"} <= set(to_head)


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("a: [", "not a cluster file"),
        ("- a", "not a cluster file"),
        ("cluster_name: a", "KeyError: 'provider'"),
        ("provider: {type: local, head_ip: 127.0.0.1}", "KeyError: 'worker_ips'"),
        ("provider: {type: aws}", "KeyError: 'available_node_types'"),
    ],
)
def test_a_file_that_is_none_is_refused_with_what_is_missing(tmp_path, text, complaint):
    with pytest.raises(ConfigError, match=complaint):
        ClusterFile.read(_file(tmp_path, text))


def test_a_file_that_is_not_there_is_named(tmp_path):
    with pytest.raises(ConfigError, match=r"No such file.*nowhere\.yaml"):
        ClusterFile.read(tmp_path / "nowhere.yaml")


@pytest.mark.skipif(not shutil.which("ssh"), reason="no ssh here (Debian: openssh-client)")
def test_a_head_without_ssh_is_named_before_ray_is_asked(tmp_path):
    text = f"{LOCAL}auth: {{ssh_user: nobody, ssh_private_key: {tmp_path}/key}}\n"

    with pytest.raises(ConfigError, match=r"(?s)no ssh .*nobody@127\.0\.0\.1: "):
        up(ClusterFile.read(_file(tmp_path, text)), within_s=30)


def test_a_machine_without_ssh_is_told_so(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))

    with pytest.raises(ConfigError, match="ssh is not installed on this machine"):
        up(ClusterFile.read(_file(tmp_path, LOCAL)), within_s=30)


def test_the_command_says_why_and_ends_with_status_one(tmp_path):
    command = [sys.executable, "-m", "prefixfleet.cluster.launch", "up", tmp_path / "no.yaml"]

    done = subprocess.run(command, capture_output=True, text=True, timeout=60)

    assert done.returncode == 1
    assert done.stderr.startswith("error: cluster file: ")
    assert "Traceback" not in done.stderr
