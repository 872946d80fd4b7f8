"""A closed-loop load generator on raw connections, in a process of its own.

``python bench_client.py URL CONNECTIONS SECONDS KIND [LEAST]`` prints one JSON object: requests a
second, percentiles of whole answers and of first bytes in ms, errors. KIND is plain, stream, or
pace_MS for a stream of an event every so many milliseconds. With LEAST it goes on until it has so
many answers, after `WARM_UP` that do not count.
"""

import asyncio
import json
import random
import sys
import time
from itertools import count
from typing import cast
from urllib.parse import urlsplit

import uvloop

PREFIXES = 32
WARM_UP = 5
MARK = "group 00000000"
"""In every question; `_Load` puts a number there, so that no prompt comes twice."""
LIMIT_S = 120.0


def bodies(kind: str) -> list[bytes]:
    """Chats of about 1,000 characters: a system prompt that a group shares, and a question."""
    made = []
    for group in range(PREFIXES):
        system = f"{group}: be brief, be exact, and follow the rules of this group. " * 15
        for question in range(4):
            asked = {
                "model": "tiny",
                "messages": [
                    {"role": "system", "content": system},
                    {"role": "user", "content": f"What is {question} of {MARK}, please?"},
                ],
                "max_tokens": 32,
            }
            if kind != "plain":
                asked["stream"] = True
            if kind.startswith("pace_"):
                asked["user"] = kind
            made.append(json.dumps(asked, separators=(",", ":")).encode())
    return made


class _Connection(asyncio.Protocol):
    """One request after the other until the time is over."""

    def __init__(self, load: "_Load") -> None:
        self._load = load
        self._seen = b""
        self._started = self._first = 0.0
        self._transport: asyncio.Transport

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's own class
        self._ask()

    def _ask(self) -> None:
        if self._load.is_over():
            self._transport.close()
            return
        self._seen, self._first = b"", 0.0
        self._started = time.perf_counter()
        self._transport.write(self._load.next_request())

    def data_received(self, data: bytes) -> None:
        now = time.perf_counter()
        self._first = self._first or now
        self._seen += data
        if not _is_whole(self._seen):
            return
        if self._seen.startswith(b"HTTP/1.1 200"):
            self._load.note(now - self._started, self._first - self._started)
        else:
            self._load.errors += 1
        self._ask()

    def connection_lost(self, error: Exception | None) -> None:
        if time.perf_counter() < self._load.until:
            self._load.errors += 1
        self._load.ended()


class _Load:
    def __init__(self, url: str, kind: str, connections: int, until: float, least: int) -> None:
        parts = urlsplit(url)
        head = f"POST /v1/chat/completions HTTP/1.1\r\nhost: {parts.netloc}\r\n"
        self._requests = [
            f"{head}content-type: application/json\r\ncontent-length: {len(b)}\r\n\r\n".encode() + b
            for b in bodies(kind)
        ]
        self._number = count(random.randrange(10**8))  # nor did an earlier load ask the same
        self.until = until
        self._least, self._to_skip = least, WARM_UP if least else 0
        self.whole_ms: list[float] = []
        self.first_ms: list[float] = []
        self.errors = 0
        self._open = connections
        self.done = asyncio.Event()

    def next_request(self) -> bytes:
        number = next(self._number)
        request = self._requests[number % len(self._requests)]
        return request.replace(MARK.encode(), b"group %08d" % (number % 10**8))

    def is_over(self) -> bool:
        return time.perf_counter() >= self.until and len(self.whole_ms) >= self._least

    def note(self, whole_s: float, first_s: float) -> None:
        if self._to_skip:
            self._to_skip -= 1
            return
        self.whole_ms.append(1_000 * whole_s)
        self.first_ms.append(1_000 * first_s)

    def ended(self) -> None:
        self._open -= 1
        if self._open == 0:
            self.done.set()


def _is_whole(seen: bytes) -> bool:
    head, end, body = seen.partition(b"\r\n\r\n")
    if not end:
        return False
    at = head.lower().find(b"content-length:")
    if at < 0:
        return body.endswith(b"0\r\n\r\n")
    return len(body) >= int(head[at + 15 :].split(b"\r\n", 1)[0])


def percentile(values: list[float], share: float) -> float:
    """Nearest rank; 0 for nothing."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))] if ordered else 0.0


async def _main(url: str, connections: int, seconds: float, kind: str, least: int) -> None:
    parts = urlsplit(url)
    assert parts.hostname
    loop = asyncio.get_running_loop()
    started = time.perf_counter()
    load = _Load(url, kind, connections, started + seconds, least)
    for _ in range(connections):
        await loop.create_connection(lambda: _Connection(load), parts.hostname, parts.port or 80)
    await asyncio.wait_for(load.done.wait(), LIMIT_S)
    elapsed = time.perf_counter() - started
    result = {
        "requests": len(load.whole_ms),
        "rps": len(load.whole_ms) / elapsed,
        "p50_ms": percentile(load.whole_ms, 0.5),
        "p99_ms": percentile(load.whole_ms, 0.99),
        "first_p50_ms": percentile(load.first_ms, 0.5),
        "first_p99_ms": percentile(load.first_ms, 0.99),
        "mean_ms": sum(load.whole_ms) / max(1, len(load.whole_ms)),
        "errors": load.errors,
    }
    sys.stdout.write(json.dumps(result))


if __name__ == "__main__":
    fewest = int(sys.argv[5]) if len(sys.argv) > 5 else 0
    uvloop.run(_main(sys.argv[1], int(sys.argv[2]), float(sys.argv[3]), sys.argv[4], fewest))
