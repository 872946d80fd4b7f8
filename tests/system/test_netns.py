"""Hosts made of namespaces keep to themselves."""

import sys

import netns
import pytest

pytestmark = pytest.mark.skipif(bool(netns.missing()), reason=f"namespace hosts: {netns.missing()}")


@pytest.fixture
def network(tmp_path):
    kept = tmp_path / "kept"
    kept.mkdir()
    (kept / "file").write_text("kept")
    with netns.Network.of(tmp_path, "one", "two", keep=[kept]) as network:
        yield network


def test_a_host_cannot_harm_the_real_machines_files(network, tmp_path):
    """Neither what it was given to read, nor this environment, nor anything else."""
    one = network["one"]
    script = f"rm -rf {tmp_path}/kept/* {sys.prefix}/pyvenv.cfg; touch {netns.REPOSITORY}/a /etc/a"

    said = one.run("sh", "-c", script, check=False).stderr

    assert said.count("Read-only file system") == 4
    assert one.run("cat", tmp_path / "kept/file").stdout == "kept"


def test_hosts_share_no_scratch_and_no_processes(network):
    one, two = network["one"], network["two"]
    one.run("touch", "/tmp/mine", "/dev/shm/mine", "/root/mine", "/run/mine")

    found = two.run("ls", "/tmp", "/dev/shm", "/root", "/run").stdout

    def alone():  # a host is ready a moment before its first process is `sleep`
        return set(two.run("ps", "ax", "-o", "comm=").stdout.split()) == {"sleep", "ps"}

    assert "mine" not in found
    netns.wait_until(alone, within_s=30, what="no processes of others")


def test_all_that_a_host_ran_ends_with_the_network(tmp_path):
    with netns.Network.of(tmp_path, "one") as network:
        process = network["one"].start("sleep", "1000", log="sleep.log")
        assert process.poll() is None

    assert process.returncode is not None
