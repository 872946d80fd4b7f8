"""Settings of nodes and workers: a wrong one stops the start and says what to set."""

from typing import get_args

import pytest

from prefixfleet.cluster.settings import EncodingName, NodeSettings, WorkerSettings
from prefixfleet.kernels.encoding import ENCODINGS
from prefixfleet.store.errors import ConfigError

NODE = {"PREFIXFLEET_NODE_NAME": "a", "PREFIXFLEET_NODE_RUNTIME_DIR": "/tmp/pf"}


@pytest.fixture
def worker(tmp_path):
    """The environment of a worker whose model folder has what a model needs."""
    for name in ("config.json", "tokenizer.json"):
        (tmp_path / name).write_text("{}")
    return {
        "PREFIXFLEET_WORKER_NAME": "w",
        "PREFIXFLEET_WORKER_NODE": "a",
        "PREFIXFLEET_WORKER_MODEL": str(tmp_path),
        "PREFIXFLEET_WORKER_SOCKET_PATH": "/tmp/pf/a.sock",
        "PREFIXFLEET_WORKER_LOG_FILE": "/tmp/pf/w.log",
    }


def test_a_node_needs_only_its_name_and_its_folder():
    settings = NodeSettings.read(NODE)

    assert str(settings.socket_path) == "/tmp/pf/a.sock"
    assert settings.link == "auto"


def test_an_unknown_name_stops_the_start_and_says_which_one_was_meant():
    with pytest.raises(ConfigError, match=r"POOL_BITES; did you mean PREFIXFLEET_NODE_POOL_BYTES"):
        NodeSettings.read(NODE | {"PREFIXFLEET_NODE_POOL_BITES": "1"})


def test_settings_of_other_processes_are_left_to_them():
    environ = NODE | {"PREFIXFLEET_WORKER_NAME": "w", "PREFIXFLEET_REDIS_URL": "redis://x"}

    assert NodeSettings.read(environ).name == "a"


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("NAME", "Two Words"),
        ("NAME", ""),
        ("PORT", "70000"),
        ("POOL_BYTES", "12"),
        ("POOL_BYTES", "1GiB"),
        ("LINK", "carrier-pigeon"),
        ("RUNTIME_DIR", "relative/dir"),
        ("RUNTIME_DIR", "/" + "d" * 90),
        ("HOST", ""),
    ],
)
def test_each_wrong_value_is_named(name, value):
    with pytest.raises(ConfigError, match=f"PREFIXFLEET_NODE_{name}"):
        NodeSettings.read(NODE | {f"PREFIXFLEET_NODE_{name}": value})


@pytest.mark.parametrize(
    ("name", "turned"),
    [
        ("LINK", "tcp"),
        ("LINK", "ucx"),
        ("PORT", "8123"),
        ("HOST", "::1"),
        ("POOL_BYTES", "2097152"),
    ],
)
def test_each_option_of_a_node_can_be_set(name, turned):
    settings = NodeSettings.read(NODE | {f"PREFIXFLEET_NODE_{name}": turned})

    assert str(getattr(settings, name.lower())) == turned


def test_a_worker_serves_its_model_under_the_name_of_its_folder(worker, tmp_path):
    assert WorkerSettings.read(worker).model_name == tmp_path.name


def test_a_worker_serves_its_model_under_another_name_when_told(worker):
    settings = WorkerSettings.read(worker | {"PREFIXFLEET_WORKER_SERVED_NAME": "small"})

    assert settings.model_name == "small"


def test_a_folder_without_a_model_is_refused_with_what_is_missing(worker, tmp_path):
    (tmp_path / "tokenizer.json").unlink()

    with pytest.raises(ConfigError, match=r"WORKER_MODEL.*no tokenizer.json there"):
        WorkerSettings.read(worker)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("CPU_CORES", "all"),
        ("ENCODING", "int4"),
        ("KV_CACHE_BYTES", "-1"),
        ("MAX_MODEL_TOKENS", "1"),
        ("NODE", "A B"),
    ],
)
def test_each_wrong_value_of_a_worker_is_named(worker, name, value):
    with pytest.raises(ConfigError, match=f"PREFIXFLEET_WORKER_{name}"):
        WorkerSettings.read(worker | {f"PREFIXFLEET_WORKER_{name}": value})


@pytest.mark.parametrize("encoding", ENCODINGS)
def test_every_encoding_there_is_can_be_set(worker, encoding):
    told = worker | {"PREFIXFLEET_WORKER_ENCODING": encoding}

    assert WorkerSettings.read(told).encoding == encoding
    assert WorkerSettings.read(worker).encoding == "exact"
    assert set(get_args(EncodingName)) == set(ENCODINGS)
