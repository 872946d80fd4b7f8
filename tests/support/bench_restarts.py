"""How many requests a router decides blindly after it, the Redis it knows, or a worker restarted.

Blind: the whole prompt is held by a node, and the router plans no reuse of it. Two nodes announce
what they hold with the daemon's own `Announcer`; the router is a process, the engines are fake.
"""

import asyncio
import contextlib
import http.client
import secrets
import threading
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from urllib.parse import urlsplit

from bench_client import bodies
from bench_proxies import announce_workers, our_process, upstreams
from bench_upstream import NAMESPACE, SECRET
from chats import write_model
from eventually import until
from indexes import node_record
from redis_servers import new_fleet

from prefixfleet.cluster.announcer import Announcer
from prefixfleet.router.body import read_body
from prefixfleet.router.prompt import prefix_chain, read_chat
from prefixfleet.router.tokens import load_tokens
from prefixfleet.store.chain import BlockHash, segment_heads
from prefixfleet.store.errors import IndexUnavailable
from prefixfleet.store.namespace import hash_key
from prefixfleet.store.redis_index import RedisIndex
from prefixfleet.store.redis_server import RedisServer

REQUESTS = 2_000
CLIENTS = 8
WORKER_DOWN_S = 0.5
RETURN_LIMIT_S = 60.0
ROUND = 200
SLOW_TOKENS_PER_S = 1e4  # else computing a prompt again could be the right choice
WARM_UP = 200
LATE_S = 1.0
NODES = 2


Seen = tuple[float, bool, str]
"""Of one answer: when it came, whether its decision was blind, and its worker's node."""


class Nodes:
    """Announces nodes and workers from a thread of its own until the block ends.

    ``engines`` are the workers' URLs at each moment: whoever restarts one puts its new one there.
    """

    def __init__(self, url: str, fleet: str, engines: list[str], folder: Path) -> None:
        self._url, self._fleet = url, fleet
        self._engines, self._folder = engines, folder
        self._stop = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._run()))
        self._announced = threading.Event()

    def __enter__(self) -> None:
        self._thread.start()
        if not self._announced.wait(30):
            raise RuntimeError("the nodes did not get into the index")

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()

    async def _run(self) -> None:
        index = RedisIndex(self._url, self._fleet)
        announcers = [
            _announcer(index, f"n{i}", held) for i, held in enumerate(_held(self._folder))
        ]
        tasks = [asyncio.create_task(announcer.run()) for announcer in announcers]
        await until(lambda: all(a.joins and not a.pending for a in announcers), 30)
        self._announced.set()
        while not self._stop.is_set():
            with contextlib.suppress(IndexUnavailable):  # as a worker's supervisor: it tries again
                await announce_workers(
                    self._engines, self._folder, self._url, self._fleet, SLOW_TOKENS_PER_S
                )
            await asyncio.sleep(0.2)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await index.close()


def _announcer(index: RedisIndex, name: str, heads: dict[BlockHash, BlockHash]) -> Announcer:
    return Announcer(
        index,
        record=lambda: node_record(name),
        resident=lambda: heads,
        segments=lambda hashes: _by_head(hashes, heads),
        joined=lambda epoch: None,
        clock=time.monotonic,
    )


def _by_head(
    hashes: Iterable[BlockHash], heads: dict[BlockHash, BlockHash]
) -> dict[BlockHash, list[BlockHash]]:
    groups: dict[BlockHash, list[BlockHash]] = {}
    for block in hashes:
        groups.setdefault(heads[block], []).append(block)
    return groups


def _held(folder: Path) -> list[dict[BlockHash, BlockHash]]:
    """Blocks of each node with their segments' heads: one of them holds a prompt, whole."""
    tokens, key = load_tokens(folder), hash_key(SECRET)
    root, size = NAMESPACE.digest(SECRET), NAMESPACE.block_tokens
    held: list[dict[BlockHash, BlockHash]] = [{} for _ in range(NODES)]
    for number, body in enumerate(bodies("plain")):
        blocks = prefix_chain(read_chat(read_body(body), tokens), root, size, key)
        held[number // 4 % NODES] |= dict(zip(blocks, segment_heads(blocks), strict=True))
    return held


def measure_restarts(work: Path) -> dict[str, dict[str, dict[str, int]]]:
    """Blind decisions of 2,000 requests around each restart, all and later than a second."""
    folder, fleet = write_model(work / "restarts"), new_fleet()
    password = secrets.token_urlsafe(16)
    with ExitStack() as stack:
        server = RedisServer.start(work / "redis-blind", password=password)
        port = urlsplit(server.url).port or 0
        mortal = stack.enter_context(ExitStack())
        engines = mortal.enter_context(upstreams(folder, 1))
        engines += stack.enter_context(upstreams(folder, NODES - 1))
        stack.enter_context(Nodes(server.url, fleet, engines, folder))
        with our_process(server.url, fleet, work) as router:
            before = _count(_ask(router.url, WARM_UP))
        with our_process(server.url, fleet, work) as router:
            after_router = _ask(router.url, REQUESTS)

            server.stop()
            server = RedisServer.start(work / "redis-blind", password=password, port=port)
            stack.callback(server.stop)
            after_redis = _ask(router.url, REQUESTS)

            after_worker = _ask_while(
                router.url, lambda: _restart(mortal, folder, engines), node="n0"
            )
    if before["blind"]:
        raise RuntimeError(f"{before['blind']} blind decisions before anything was restarted")
    counts = {"router": after_router, "redis": after_redis, "worker": after_worker}
    return {"blind_decisions": {name: _count(seen) for name, seen in counts.items()}}


def _restart(mortal: ExitStack, folder: Path, engines: list[str]) -> None:
    """Kill the first engine, and start it again under another URL."""
    mortal.close()
    time.sleep(WORKER_DOWN_S)
    engines[:1] = mortal.enter_context(upstreams(folder, 1))


def _ask_while(url: str, disturb: Callable[[], None], node: str) -> list[Seen]:
    """Like `_ask`, with ``disturb`` called after a quarter of the requests, from which on seconds
    are counted; more of them than `REQUESTS` if ``node`` needs longer until it answers again."""
    seen = _ask(url, REQUESTS // 4)
    until_s = time.monotonic() + RETURN_LIMIT_S
    started = time.monotonic()
    before = [(at_s - seen[-1][0], blind, by) for at_s, blind, by in seen]
    after: list[Seen] = []
    with ThreadPoolExecutor(1) as disturbing:
        disturbed = disturbing.submit(disturb)
        while len(before + after) < REQUESTS or not disturbed.done() or not _is_back(after, node):
            since_s = time.monotonic() - started
            part = _ask(url, ROUND)
            after += [(since_s + at_s, blind, by) for at_s, blind, by in part]
            if time.monotonic() > until_s:
                raise RuntimeError(f"{node} gets no requests after its worker was restarted")
        disturbed.result()
    return before + after


def _is_back(seen: list[Seen], node: str) -> bool:
    return node in {by for _, _, by in seen[-ROUND:]}


def _ask(url: str, requests: int) -> list[Seen]:
    """What was seen of each request, in the order of the answers; seconds since the start."""
    started, seen = time.monotonic(), list[Seen]()
    with ThreadPoolExecutor(CLIENTS) as clients:
        for first in range(CLIENTS):
            clients.submit(_ask_some, url, range(first, requests, CLIENTS), started, seen)
    if len(seen) < requests:
        raise RuntimeError(f"{requests - len(seen)} of {requests} were not answered with 200")
    return seen


def _ask_some(url: str, numbers: range, started: float, seen: list[Seen]) -> None:
    connection = http.client.HTTPConnection(urlsplit(url).netloc, timeout=30)
    prompts = bodies("plain")
    for number in numbers:
        connection.request("POST", "/v1/chat/completions", prompts[number % len(prompts)])
        answer = connection.getresponse()
        answer.read()
        if answer.status != 200:
            raise RuntimeError(f"request {number}: status {answer.status}")
        told = answer.headers
        reused = [told[f"x-prefixfleet-{kind}-tokens"] for kind in ("hit", "pulled")]
        node = told["x-prefixfleet-node"]
        seen.append((time.monotonic() - started, reused == ["0", "0"], node))
    connection.close()


def _count(seen: list[Seen]) -> dict[str, int]:
    blind = [at_s for at_s, is_blind, _ in seen if is_blind]
    return {
        "requests": len(seen),
        "blind": len(blind),
        "blind_after_1_s": sum(at_s > LATE_S for at_s in blind),
    }
