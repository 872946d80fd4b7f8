"""`ray up` with the cluster file we ship, on hosts made of namespaces: up, in use, cut, down."""

import sys
from concurrent.futures import ThreadPoolExecutor

import netns
import pytest
from host_fleet import CLUSTER_FILE, LAUNCH, ask, hosts, logs, states

from prefixfleet.cluster.model import default_cache_dir, demo_model

pytestmark = [
    pytest.mark.skipif(bool(netns.missing()), reason=f"namespace hosts: {netns.missing()}"),
    pytest.mark.timeout(1800),
]

OURS = "raylet|gcs_server|VLLM|vllm|prefixfleet-router|ray::"
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
PROMPT = "The quick brown fox jumps over the lazy dog, and then it sleeps. " * 60


def _up(network, within_s=400):
    command = [*LAUNCH, "up", CLUSTER_FILE, "--within", str(within_s)]
    said = network["operator"].run(*command, timeout_s=within_s + 10).stdout
    return set(said.splitlines()[-1].split()[3:])


def _down(network):
    command = [*LAUNCH, "down", CLUSTER_FILE, "--within", "60"]
    return network["operator"].run(*command, timeout_s=240)


def _left(network):
    """Processes of ours, by host."""
    found = {
        host.name: host.run("pgrep", "-af", OURS, check=False).stdout for host in network.hosts
    }
    return {name: text for name, text in found.items() if text}


def _complete(network, prompt=PROMPT, **options):
    body = {"model": "small", "prompt": prompt, "max_tokens": 12, "temperature": 0, **options}
    return ask(network["operator"], "/v1/completions", body)


def _hit_tokens(answer):
    return int(answer.headers["x-prefixfleet-hit-tokens"])


def test_every_host_joins_takes_work_and_is_free_again_after_down(tmp_path):
    """Autoscaler v2 leaves out the last worker, and `ray down` leaves workers running."""
    with hosts(tmp_path, model=None) as network:
        head = network["head"]

        joined = _up(network)
        placed = head.run("bash", "-ic", f"python - <<'END'\n{WHERE}\nEND", timeout_s=60).stdout
        stranger = head.run("env", f"{sys.prefix}/bin/ray", "status", check=False)
        down = _down(network)

        assert joined == {"10.77.0.2", "10.77.0.3", "10.77.0.4"}
        assert placed.splitlines()[-1] == "placed on 10.77.0.2 10.77.0.3 10.77.0.4"
        assert stranger.returncode, "without the token nobody may use the cluster"
        assert "not stopped" not in down.stderr
        netns.wait_until(lambda: _left(network) == {}, within_s=60, what="processes end")


def test_a_host_without_ssh_is_named_before_anything_is_started(tmp_path):
    """`ray up` itself would retry for ever without a word."""
    with hosts(tmp_path, model=None) as network:
        operator, worker = network["operator"], network["worker2"]
        network.cut(worker)

        up = operator.run(*LAUNCH, "up", CLUSTER_FILE, timeout_s=60, check=False)

        assert up.returncode == 1
        assert f"root@{worker.address}" in up.stderr
        assert f"root@{network['worker1'].address}" not in up.stderr
        assert _left(network) == {}


@pytest.mark.engine
def test_a_fleet_serves_across_hosts_while_one_is_cut_off_and_comes_back(tmp_path):
    """Two engines on two hosts; the answers stay the same whoever gives them."""
    model = demo_model(default_cache_dir(), lambda text: None)
    with hosts(tmp_path, model=model) as network:
        _up(network)
        both = {"worker1-0": "ready", "worker2-0": "ready"}

        def becomes(wanted, within_s):
            what = f"workers {wanted}"
            try:
                netns.wait_until(
                    lambda: states(network["operator"]) == wanted, within_s=within_s, what=what
                )
            except AssertionError as error:
                raise AssertionError(f"{error}\n{logs(network)}") from None

        becomes(both, 600)
        answers = [_complete(network)]
        assert _hit_tokens(answers[0]) == 0

        def found():  # a worker of which less is known may be tried once
            answers.append(_complete(network))
            return _hit_tokens(answers[-1]) > 500

        netns.wait_until(found, within_s=300, what="a hit")
        first = answers[-1].headers["x-prefixfleet-node"]
        [other] = {"worker1", "worker2"} - {first}

        network.cut(network[first])
        becomes({f"{other}-0": "ready"}, 120)
        alone = _complete(network)
        network.heal(network[first])
        becomes(both, 600)
        with ThreadPoolExecutor(6) as clients:
            crowd = list(clients.map(lambda i: _complete(network, f"{PROMPT} {i}"), range(6)))
        down = _down(network)

        texts = {answer.json()["choices"][0]["text"] for answer in (*answers, alone)}
        assert len(texts) == 1
        assert alone.headers["x-prefixfleet-node"] == other
        assert {answer.status for answer in crowd} == {200}
        assert {answer.headers["x-prefixfleet-node"] for answer in crowd} <= {first, other}
        assert "not stopped" not in down.stderr
        netns.wait_until(lambda: _left(network) == {}, within_s=60, what="engines end")
