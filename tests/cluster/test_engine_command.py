"""How an engine is started: what it is told, and what it must not inherit."""

import json
from itertools import pairwise

import pytest

from prefixfleet.cluster.engine_command import cores_for, engine_command, engine_environ
from prefixfleet.cluster.settings import WorkerSettings


def worker(folder, **others):
    for name in ("config.json", "tokenizer.json"):
        (folder / name).write_text("{}")
    return WorkerSettings(
        name="w", node="a", model=folder, socket_path="/run/a.sock", log_file="/tmp/log",
        **{"cpu_cores": "1"} | others,
    )  # fmt: skip


@pytest.fixture
def settings(tmp_path):
    return worker(tmp_path)


def options(command):
    return dict(pairwise(command))


def test_the_connector_is_told_where_its_daemon_is_and_a_failed_load_is_computed(settings):
    transfer = json.loads(options(engine_command(settings, 9))["--kv-transfer-config"])

    assert transfer["kv_connector_extra_config"]["socket"] == "/run/a.sock"
    assert transfer["kv_connector_extra_config"]["encoding"] == "exact"
    assert transfer["kv_load_failure_policy"] == "recompute"
    assert transfer["kv_role"] == "kv_both"


def test_an_engine_tells_of_its_own_cache_where_only_this_user_can_listen(settings):
    events = json.loads(options(engine_command(settings, 9))["--kv-events-config"])

    assert events["enable_kv_cache_events"]
    assert (events["endpoint"], events["replay_endpoint"]) == (
        "ipc:///run/w.kve",
        "ipc:///run/w.kvr",
    )


def test_the_settings_reach_the_engine(settings):
    told = options(engine_command(settings, 4321))

    assert told["--port"] == "4321"
    assert told["--model"] == str(settings.model)
    assert told["--served-model-name"] == settings.model.name
    assert told["--max-model-len"] == "4096"
    assert told["--kv-cache-memory-bytes"] == str(512 << 20)


def test_ranks_are_processes_of_this_host_and_share_its_cores(tmp_path):
    settings = worker(tmp_path, tensor_parallel=2, cpu_cores="0,1,2,3", kv_cache_bytes=1 << 30)

    told = options(engine_command(settings, 9))

    assert told["--tensor-parallel-size"] == "2"
    assert told["--distributed-executor-backend"] == "mp"
    assert told["--kv-cache-memory-bytes"] == str(1 << 30)
    assert engine_environ(settings, {})["VLLM_CPU_OMP_THREADS_BIND"] == "0,1|2,3"


def test_an_engine_of_one_rank_is_told_of_no_others(settings):
    assert "--tensor-parallel-size" not in engine_command(settings, 9)


def test_a_gpu_engine_finds_its_memory_itself(settings, monkeypatch):
    monkeypatch.setattr("prefixfleet.cluster.engine_command._is_cpu_build", lambda: False)

    command = engine_command(settings, 9)

    assert not {"--kv-cache-memory-bytes", "--max-num-seqs", "--dtype"} & set(command)


def test_further_options_reach_the_engine_as_a_shell_would_take_them(tmp_path):
    given = "--gpu-memory-utilization 0.95 --override-generation-config '{\"top_k\": 1}'"

    command = engine_command(worker(tmp_path, engine_options=given), 9)

    assert command[-4:] == [
        *("--gpu-memory-utilization", "0.95"),
        *("--override-generation-config", '{"top_k": 1}'),
    ]


@pytest.mark.parametrize(
    "given",
    [
        *("--port 1", "--kv_transfer_config={}", "--seed 1 -tp=2", "-tp 2", "-t 2"),
        *("--tensor-parallel 2", "--pipeline-parallel 2", "--kv-transfer-conf '{}'", "--hos ::"),
        *("--kv-events-config.endpoint tcp://*:5557", "--config /x.yaml", "--no-such --mod m"),
    ],
)
def test_options_that_the_worker_sets_itself_are_refused(tmp_path, given):
    with pytest.raises(ValueError, match="which prefixfleet sets"):
        worker(tmp_path, engine_options=given)


@pytest.mark.parametrize(
    "given",
    ["--seed 1", "--quantization fp8", "--compilation-config.level 3", "--dtype half", "-- x"],
)
def test_other_options_are_taken(tmp_path, given):
    assert worker(tmp_path, engine_options=given).engine_options == given


def test_a_quotation_that_does_not_end_is_refused(tmp_path):
    with pytest.raises(ValueError, match="quotation"):
        worker(tmp_path, engine_options="--seed '1")


def test_the_engine_inherits_no_secret_of_ours_and_nothing_of_rays(settings):
    base = {
        "PATH": "/bin",
        "PREFIXFLEET_SECRET_FILE": "/s",
        "RAY_AUTH_TOKEN": "t",
        "OMP_NUM_THREADS": "1",
    }

    environ = engine_environ(settings, base)

    assert environ["PATH"] == "/bin"
    assert not base.keys() & environ.keys() - {"PATH"}
    assert environ["VLLM_CPU_OMP_THREADS_BIND"] == "1"
    assert environ["HF_HUB_OFFLINE"] == environ["VLLM_NO_USAGE_STATS"] == "1"


@pytest.mark.parametrize(
    ("workers", "cores", "shares"),
    [
        (1, [0, 1, 2, 3], ["0,1,2,3"]),
        (2, [0, 1, 2, 3], ["0,1", "2,3"]),
        (2, [4, 7, 9], ["4", "7"]),
        (3, [0, 1], ["0", "1", "0"]),
    ],
)
def test_engines_of_a_host_do_not_share_cores_while_there_are_enough(workers, cores, shares):
    assert [cores_for(i, workers, cores) for i in range(workers)] == shares
