"""The cluster files we ship, held against Ray's own schema and against what peers tripped over."""

from pathlib import Path

import pytest
import ray.autoscaler._private.util as ray_config
import yaml

FOLDER = Path(__file__).resolve().parents[2] / "cluster"
FILES = sorted(FOLDER.glob("ray-cluster*.yaml"))
each_file = pytest.mark.parametrize("file", FILES, ids=lambda path: path.stem)


def _starts(cluster):
    yield from cluster["head_start_ray_commands"]
    yield from cluster["worker_start_ray_commands"]


@each_file
def test_ray_accepts_it(file):
    prepared = ray_config.prepare_config(yaml.safe_load(file.read_text()))

    ray_config.validate_config(prepared)


@each_file
def test_a_misspelt_key_would_not_pass(file):
    """Else the test above proves nothing."""
    prepared = ray_config.prepare_config(yaml.safe_load(file.read_text()) | {"setup_comands": []})

    with pytest.raises(Exception, match="setup_comands"):
        ray_config.validate_config(prepared)


@each_file
def test_every_host_gets_the_same_settings_and_no_secret_is_written_down(file):
    cluster = yaml.safe_load(file.read_text())
    words = file.read_text().lower()

    assert cluster["file_mounts"] == {"~/.prefixfleet": "~/.prefixfleet"}
    assert ".prefixfleet/fleet.env" in words
    assert not any(secret in words for secret in ("requirepass", "auth_token=", "password:"))


@each_file
def test_ray_leaves_redis_its_port_and_stops_what_ran_before(file):
    cluster = yaml.safe_load(file.read_text())

    for verb in ("head", "worker"):
        stop, start = cluster[f"{verb}_start_ray_commands"][:2]
        assert stop == "ray stop"
        assert ":6380" in start or "--port=6380" in start
        assert "--disable-usage-stats" in start
        assert "ulimit -n $(ulimit -Hn)" in start


@each_file
def test_memory_can_be_locked_where_there_is_rdma(file):
    cluster = yaml.safe_load(file.read_text())
    start = cluster["worker_start_ray_commands"][1]
    options = " ".join(cluster.get("docker", {}).get("run_options", []))

    assert "ulimit -l unlimited" in start or "memlock=-1" in options
    assert "/dev/infiniband" in file.read_text()


def test_the_local_file_keeps_the_autoscaler_that_counts_right():
    """Version 2 counts the head as a worker and starts one too few; `ray up` asks for it."""
    cluster = yaml.safe_load((FOLDER / "ray-cluster.yaml").read_text())

    assert cluster["head_start_ray_commands"][1].startswith("export RAY_enable_autoscaler_v2=0;")
