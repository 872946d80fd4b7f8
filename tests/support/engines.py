"""Real vLLM servers on real node daemons, each a process, started as a worker starts them."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
import uuid
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from prefixfleet.cluster.engine_command import (
    BLOCK_TOKENS,
    CONNECTOR_MODULE,
    engine_command,
    engine_environ,
)
from prefixfleet.cluster.ports import hold_port
from prefixfleet.cluster.settings import EncodingName, WorkerSettings
from prefixfleet.store.records import PullPlan

START_S = 600.0
ANSWER_S = 100.0
STOP_S = 30.0
HERE = Path(__file__).parent
PATIENT = HERE / "patient"


@dataclass(frozen=True, slots=True)
class Answer:
    """What one request got."""

    texts: tuple[str, ...]
    outcome: dict[str, Any]
    cached_tokens: int
    likely: dict[str, float]  # log-probabilities of the first token; asked for by ``logprobs``


class Node:
    """A node daemon. `kill` ends it as a crash does; `start` makes its next life."""

    def __init__(self, name: str, folder: Path, environ: dict[str, str], pool_bytes: int) -> None:
        self.name = name
        self.socket = folder / f"{name}.sock"
        self._log = folder / f"{name}.log"
        self._environ = (
            os.environ
            | environ
            | {
                "PREFIXFLEET_NODE_NAME": name,
                "PREFIXFLEET_NODE_RUNTIME_DIR": str(folder),
                "PREFIXFLEET_NODE_POOL_BYTES": str(pool_bytes),
                "PREFIXFLEET_NODE_LINK": "tcp",
            }
        )
        self._process: subprocess.Popen[str] | None = None
        self._url = ""

    def start(self) -> None:
        with self._log.open("a") as log:
            self._process = subprocess.Popen(
                [sys.executable, str(HERE / "node_process.py")],
                env=self._environ,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
            )
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        assert line, f"node {self.name} did not start:\n{self._log.read_text()[-2000:]}"
        self._url = json.loads(line)["http"]

    def signal(self, number: int) -> None:
        assert self._process is not None
        self._process.send_signal(number)
        if number in (signal.SIGKILL, signal.SIGTERM):
            self._process.wait(STOP_S)
            assert self._process.stdout is not None
            self._process.stdout.close()

    def stop(self) -> None:
        if self._process is not None and self._process.poll() is None:
            self.signal(signal.SIGTERM)

    def status(self) -> dict[str, Any]:
        return get_json(f"{self._url}/status")

    def wait_for_engines(self, connections: int = 2) -> None:
        """Until an engine's scheduler and its ranks are made welcome: one that only opened a
        socket has no daemon yet, and saves nothing."""

        def welcomed() -> int:
            kinds = self.status()["stats"]["kinds"].values()
            return sum(kind["connections"] for kind in kinds)

        wait_until(lambda: welcomed() >= connections)

    def wait_idle(self, engine: "Engine") -> None:
        """Until what ``engine`` computed is here and in the index, and nothing is held. An answer
        comes before its blocks are saved, and between two parts of a save nothing is held."""
        engine.forget()

        def idle() -> bool:
            stats = self.status()["stats"]
            tier = stats["tiers"].get("dram", {"pinned": 0, "reserved": 0})
            return not (tier["pinned"] or tier["reserved"] or stats["index"]["pending_blocks"])

        wait_until(idle)

    @property
    def resident_blocks(self) -> int:
        """Blocks in its memory."""
        return int(self.status()["stats"]["tiers"].get("dram", {}).get("resident", 0))

    @property
    def epoch(self) -> int:
        return int(self.status()["epoch"])


class Engine:
    """A vLLM server whose connector talks to a node's daemon, however late that answers (see
    `patient_connector`); a ``plain`` one has no connector."""

    def __init__(
        self, settings: WorkerSettings, options: list[str], *, plain: bool = False
    ) -> None:
        with hold_port(settings.host) as held:
            port = held.getsockname()[1]
            self.url = f"http://{settings.host}:{port}"
            self._log = settings.log_file
            environ = engine_environ(settings, os.environ) | {
                "VLLM_SERVER_DEV_MODE": "1",  # for /reset_prefix_cache
                "VLLM_ENABLE_RESPONSES_API_STORE": "1",
                "VLLM_RPC_BASE_PATH": str(self._log.parent),  # else it leaves sockets in /tmp
                "PYTHONPATH": os.pathsep.join((str(PATIENT), os.environ.get("PYTHONPATH", ""))),
            }
            command = [*engine_command(settings, port), *options]
            at = command.index("--kv-transfer-config") + 1
            command[at] = command[at].replace(CONNECTOR_MODULE, "patient_connector")
            if plain:
                del command[at - 1 : at + 1]
            with self._log.open("w") as log:
                self._process = subprocess.Popen(
                    command,
                    env=environ,
                    stdout=log,
                    stderr=log,
                    start_new_session=True,
                )
            try:
                wait_until(self._is_up, START_S)
            except BaseException:
                self.stop()
                raise

    def ask(
        self, prompt: list[int], tokens: int = 12, patience_s: float = ANSWER_S, **fields: Any
    ) -> Answer:
        """A completion, greedy unless ``fields`` say otherwise. Hangs up after ``patience_s``."""
        question = {
            "model": "model",
            "prompt": prompt,
            "max_tokens": tokens,
            "temperature": 0,
            "ignore_eos": True,
            "return_token_ids": True,
            "return_tokens_as_token_ids": True,
        }
        said = post_json(f"{self.url}/v1/completions", question | fields, patience_s)
        return Answer(
            texts=tuple(json.dumps(choice["token_ids"]) for choice in said["choices"]),
            outcome=(said["kv_transfer_params"] or {}).get("prefixfleet", {}),
            cached_tokens=(said["usage"]["prompt_tokens_details"] or {}).get("cached_tokens") or 0,
            likely=(said["choices"][0]["logprobs"] or {"top_logprobs": [{}]})["top_logprobs"][0],
        )

    def forget(self) -> None:
        """Empty the engine's own prefix cache; the node's pool keeps its blocks.

        The engine refuses, with status 200, while a request or a save holds a block.
        """
        wait_until(lambda: post_json(f"{self.url}/reset_prefix_cache", {}, ANSWER_S)["success"])

    def waiting(self) -> float:
        """Requests that are not being computed yet."""
        return self._gauge("vllm:num_requests_waiting")

    def running(self) -> float:
        """Requests that are being computed."""
        return self._gauge("vllm:num_requests_running")

    def load_seconds(self) -> float:
        """Of copying blocks in, since its start."""
        return self._gauge("prefixfleet_connector_load_seconds_total")

    def _gauge(self, name: str) -> float:
        lines = get(f"{self.url}/metrics").splitlines()
        return sum(float(x.rsplit(" ", 1)[1]) for x in lines if x.startswith(f"{name}{{"))

    def stop(self) -> None:
        """SIGINT, as from a terminal; by force if that takes too long."""
        with contextlib.suppress(ProcessLookupError):
            self._process.send_signal(signal.SIGINT)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(STOP_S)
            os.killpg(self._process.pid, signal.SIGKILL)  # what it left of its group
            self._process.wait(STOP_S)

    def _is_up(self) -> bool:
        if self._process.poll() is not None:
            raise AssertionError(f"engine ended:\n{self._log.read_text()[-4000:]}")
        try:
            get(f"{self.url}/health")
        except OSError:
            return False
        return True


@contextlib.contextmanager
def running_pair(
    folder: Path,
    model: Path,
    redis_url: str,
    pool_bytes: dict[str, int],
    encodings: Mapping[str, EncodingName] | None = None,
    environ: Mapping[str, str] | None = None,
    ranks: int = 1,
) -> Iterator[tuple[dict[str, Node], dict[str, Engine]]]:
    """A node and an engine for each name in ``pool_bytes``, started at the same time.

    Engines store exact blocks, but for the names in ``encodings``, and have ``ranks`` of tensor
    parallelism; ``environ`` is told to nodes.
    """
    secret = folder / "secret"
    secret.write_text("a secret of the test")
    fleet = dict(environ or {}) | {
        "PREFIXFLEET_REDIS_URL": redis_url,
        "PREFIXFLEET_FLEET": "engines",
        "PREFIXFLEET_SECRET_FILE": str(secret),
    }
    nodes = {name: Node(name, folder, fleet, size) for name, size in pool_bytes.items()}
    with contextlib.ExitStack() as stack:
        for node in nodes.values():
            node.start()
            stack.callback(node.stop)
        engines = start_engines(folder, model, nodes, encodings or {}, ranks)
        for engine in engines.values():
            stack.callback(engine.stop)
        for node in nodes.values():
            node.wait_for_engines(1 + ranks)
        yield nodes, engines


def start_engines(
    folder: Path,
    model: Path,
    nodes: dict[str, Node],
    encodings: Mapping[str, EncodingName],
    ranks: int = 1,
) -> dict[str, Engine]:
    """One core each, small steps so that prompts are computed in chunks."""
    from concurrent.futures import ThreadPoolExecutor

    cores = sorted(os.sched_getaffinity(0))

    def start(number: int, node: Node) -> Engine:
        settings = WorkerSettings(
            name=f"engine-{node.name}",
            node=node.name,
            model=model,
            served_name="model",
            socket_path=node.socket,
            log_file=folder / f"engine-{node.name}.log",
            kv_cache_bytes=256 << 20,
            max_model_tokens=2048,
            cpu_cores=str(cores[number % len(cores)]),
            tensor_parallel=ranks,
            encoding=encodings.get(node.name, "exact"),
        )
        return Engine(settings, ["--max-num-batched-tokens", "160"])

    with ThreadPoolExecutor(len(nodes)) as starters:
        started = starters.map(start, range(len(nodes)), nodes.values())
        return dict(zip(nodes, started, strict=True))


def plan_for(source: Node, num_tokens: int, budget_s: float = 20.0) -> dict[str, Any]:
    """What a router tells an engine that shall pull a prompt's blocks from ``source``."""
    pulled = PullPlan(
        request=uuid.uuid4().hex,
        source=source.name,
        source_epoch=source.epoch,
        blocks=num_tokens // BLOCK_TOKENS,
        budget_s=budget_s,
    )
    return {"prefixfleet": asdict(pulled)}


def tokens_of_text(model: Path) -> list[int]:
    """Token ids of real text."""
    from tokenizers import Tokenizer

    text = (HERE.parents[1] / "DESIGN.md").read_text()
    ids: list[int] = Tokenizer.from_file(str(model / "tokenizer.json")).encode(text).ids
    return ids


def wait_until(condition: Callable[[], Any], timeout_s: float = 60.0) -> Any:
    """The first true value of ``condition()``, by polling."""
    deadline = time.monotonic() + timeout_s
    while not (value := condition()):
        assert time.monotonic() < deadline, f"not within {timeout_s:g} s"
        time.sleep(0.05)
    return value


def get(url: str) -> str:
    with urllib.request.urlopen(url, timeout=ANSWER_S) as answer:
        return str(answer.read().decode())


def get_json(url: str) -> dict[str, Any]:
    value: dict[str, Any] = json.loads(get(url))
    return value


def post_json(url: str, question: dict[str, Any], patience_s: float) -> dict[str, Any]:
    request = urllib.request.Request(
        url, json.dumps(question).encode(), {"content-type": "application/json"}
    )
    try:
        with urllib.request.urlopen(request, timeout=patience_s) as answer:
            value: dict[str, Any] = json.loads(answer.read())
            return value
    except urllib.error.HTTPError as error:
        raise AssertionError(f"{url}: {error.code} {error.read()[:500]!r}") from error
