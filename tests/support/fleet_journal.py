"""What `fleet_load` wrote down, and what follows from it: who noticed when, what was lost."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

WINDOW = 20
"""Answers of which a hit rate is taken."""
FULL = 0.97
"""The hit rate is back when it is so much of what it was."""


class Journal:
    """Reads a file that grows. Owned by one reader."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._read = 0
        self._requests: list[dict[str, Any]] = []
        self._seen: list[dict[str, Any]] = []

    def workers(self) -> dict[str, str]:
        """State of each worker, as the router said last."""
        return self._last("workers")

    def nodes(self) -> dict[str, list[Any]]:
        """Epoch and suspicion of each node, as the router said last."""
        return self._last("nodes")

    def worker_left(self, worker: str, since: float) -> float | None:
        """Seconds from ``since`` until the router did not use the worker any more."""
        return self._when(since, lambda s: s.get("workers", {}).get(worker) != "ready")

    def worker_back(self, worker: str, since: float) -> float | None:
        """Seconds from ``since`` until the worker, gone meanwhile, was used again."""
        left = self.worker_left(worker, since)
        if left is None:
            return None
        back = self._when(since + left, lambda s: s.get("workers", {}).get(worker) == "ready")
        return None if back is None else left + back

    def node_left(self, node: str, epoch: int, since: float) -> float | None:
        """Seconds from ``since`` until the router did not believe that life of the node."""
        return self._when(since, lambda s: s.get("nodes", {}).get(node) != [epoch, False])

    def nodes_again(self, lives: dict[str, list[Any]], since: float) -> float | None:
        """Seconds from ``since`` until the router believed a later life of every node."""

        def again(seen: dict[str, Any]) -> bool:
            nodes = seen.get("nodes", {})
            return all(
                nodes.get(n, [0])[0] > life[0] and not nodes[n][1] for n, life in lives.items()
            )

        return self._when(since, again)

    def answers(self, since: float) -> int:
        """Requests that ended well and began after ``since``."""
        self._catch_up()
        return sum(r["how"] == "ok" and r["began"] >= since for r in self._requests)

    def errors(self, since: float) -> list[str]:
        """What clients were told instead of an answer, of requests that ended after ``since``."""
        self._catch_up()
        return [r["how"] for r in self._requests if r["how"] != "ok" and r["ended"] >= since]

    def lost(self, since: float, until: float, *, on: str) -> dict[str, Any]:
        """Requests lost in that time: streams that were open on host ``on``, and all others."""
        self._catch_up()
        ended = [r for r in self._requests if since <= r["ended"] <= until]
        bad = [r for r in ended if r["how"] != "ok"]
        streams = [r for r in bad if r["stream"] and r.get("open") and r["node"] == on]
        others = [r for r in bad if r not in streams]
        return {
            "requests": len(ended),
            "lost_open_streams": len(streams),
            "lost_others": len(others),
            "others": [f"{r['ended'] - since:.2f} s {r['node']} {r['how']:.200}" for r in others],
        }

    def hit_rate(self, count: int) -> float:
        """Of the last ``count`` answers that say it: blocks not computed, of all full blocks."""
        self._catch_up()
        return _rate([r for r in self._requests if "reused" in r][-count:])

    def back(self, since: float, before: float) -> float | None:
        """Seconds from ``since`` until the end of the first `WINDOW` with the full hit rate from
        which on there was no other; None if there is none at the end."""
        rates = list(self._rates(since, float("inf")))
        if not rates or rates[-1][1] < FULL * before:
            return None
        low = [at for at, rate in rates if rate < FULL * before]
        return max(low, default=since) - since

    def lowest(self, since: float, until: float) -> float:
        """The lowest hit rate of any `WINDOW` answers in that time."""
        return min((rate for _, rate in self._rates(since, until)), default=0.0)

    def tail(self) -> str:
        """The last lines, for a failure's message."""
        self._catch_up()
        return "\n".join(map(str, [*self._seen[-3:], *self._requests[-5:]]))

    def _rates(self, since: float, until: float) -> Iterator[tuple[float, float]]:
        self._catch_up()
        told = [r for r in self._requests if "reused" in r and since <= r["ended"] <= until]
        for end in range(WINDOW, len(told) + 1):
            yield told[end - 1]["ended"], _rate(told[end - WINDOW : end])

    def _when(self, since: float, true: Any) -> float | None:
        self._catch_up()
        ends = [*(s["at"] for s in self._seen[1:]), float("inf")]
        for seen, end in zip(self._seen, ends, strict=True):
            if end > since and true(seen):
                return max(0.0, float(seen["at"]) - since)
        return None

    def _last(self, what: str) -> dict[str, Any]:
        self._catch_up()
        found: dict[str, Any] = self._seen[-1].get(what, {}) if self._seen else {}
        return found

    def _catch_up(self) -> None:
        if not self._path.exists():
            return
        with self._path.open() as lines:
            lines.seek(self._read)
            while (line := lines.readline()).endswith("\n"):
                self._read = lines.tell()
                said = json.loads(line)
                (self._seen if "at" in said else self._requests).append(said)


def _rate(told: list[dict[str, Any]]) -> float:
    blocks = sum(r["blocks"] for r in told)
    return sum(r["reused"] for r in told) / blocks if blocks else 0.0
