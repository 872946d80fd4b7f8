"""A day of a fleet under load: python tests/bench/fleet.py --json

A killed engine, a killed daemon, a node frozen or cut off for a while, a killed primary of Redis, a
rolling update: who noticed when, what was lost, and when the hit rate was back. By default four
nodes on this machine by `prefixfleet up`; with --hosts N a head and N hosts made of namespaces
(root; see netns.py), by `ray up` with the cluster file we ship. Ray, daemons, workers, links, Redis
and router are the real ones; the engines are `fast_vllm`, which keep the connector's contract and
compute nothing: real ones would want all cores of a small machine. The last line is one JSON
object.
"""

import argparse
import contextlib
import json
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "support"))

import netns
from fleet_places import Hosts, Local, small_model
from host_fleet import hosts
from redis_groups import under_sentinel

READY_S, NOTICE_S, BACK_S = 300, 60, 240
WARM = 60
"""Answers of which the hit rate before and after something is taken."""
CUT_S = 5.0


def say(text: str) -> None:
    sys.stderr.write(f"fleet: {text}\n")


class Day:
    """What happens to a fleet, and what came of it. Owned by its caller."""

    def __init__(self, place: Hosts | Local) -> None:
        self._place = place
        self._journal = place.journal

    def warm_up(self) -> None:
        """Until all workers serve and most prompts are known."""
        wanted = dict.fromkeys(self._place.workers.values(), "ready")
        self._until(lambda: self._journal.workers() == wanted, READY_S, f"workers {wanted}")
        began = time.monotonic()
        self._until(lambda: self._journal.answers(began) >= 2 * WARM, BACK_S, "answers")

    def broken(self, fault: str, node: str) -> dict[str, Any]:
        """One fault, until the fleet is as before."""
        worker = self._place.workers[node]
        before = self._journal.hit_rate(WARM)
        epoch = self._journal.nodes().get(node, [0])[0]
        began = time.monotonic()
        self._place.do(fault, node)

        def noticed_s() -> float | None:
            if fault == "killed_daemon":
                return self._journal.node_left(node, epoch, began)
            return self._journal.worker_left(worker, began)

        self._until(lambda: noticed_s() is not None, NOTICE_S, f"{fault} noticed")
        if fault in ("cut_host", "frozen_node"):
            time.sleep(CUT_S)
        self._place.undo(node)
        healed = time.monotonic()

        def as_before() -> bool:
            ready = self._journal.workers().get(worker) == "ready"
            there = self._journal.nodes().get(node, [0, True])
            reads = there[0] > epoch or fault == "killed_engine" or not there[1]
            return ready and reads and self._journal.back(healed, before) is not None

        self._until(as_before, BACK_S, f"{fault}: hit rate {before:.3f}")
        until = time.monotonic()
        return {
            "noticed_s": noticed_s(),
            "hit_rate_before": before,
            "hit_rate_lowest": self._journal.lowest(began, until),
            "full_hit_rate_s": self._journal.back(began, before),
            "worker_back_s": self._journal.worker_back(worker, began),
            **self._journal.lost(began, until, on=node),
        }

    def killed_redis(self) -> dict[str, Any]:
        """The index dies, until all nodes have joined its successor and the fleet is as before."""
        assert isinstance(self._place, Local), "the hosts' Redis has no stand-in"
        before, lives = self._journal.hit_rate(WARM), self._journal.nodes()
        began = time.monotonic()
        self._place.kill_redis()

        def as_before() -> bool:
            again = self._journal.nodes_again(lives, began) is not None
            wanted = dict.fromkeys(self._place.workers.values(), "ready")
            return (
                again
                and self._journal.workers() == wanted
                and self._journal.back(began, before) is not None
            )

        self._until(as_before, BACK_S, f"killed_redis: hit rate {before:.3f}")
        errors = self._journal.errors(began)
        return {
            "nodes_again_s": self._journal.nodes_again(lives, began),
            "hit_rate_before": before,
            "hit_rate_lowest": self._journal.lowest(began, time.monotonic()),
            "full_hit_rate_s": self._journal.back(began, before),
            "requests": self._journal.answers(began) + len(errors),
            "client_errors": len(errors),
            "errors": errors[:5],
        }

    def update(self) -> dict[str, Any]:
        """Every engine exchanged for one with another setting, while clients ask."""
        before, began = self._journal.hit_rate(WARM), time.monotonic()
        self._place.update()
        done = time.monotonic()
        self._until(lambda: self._journal.answers(done) >= WARM, BACK_S, "answers")
        errors = self._journal.errors(began)
        return {
            "workers": len(self._place.workers),
            "seconds": done - began,
            "requests": self._journal.answers(began) + len(errors),
            "client_errors": len(errors),
            "errors": errors[:5],
            "hit_rate_before": before,
            "hit_rate_lowest": self._journal.lowest(began, time.monotonic()),
            "hit_rate_after": self._journal.hit_rate(WARM),
        }

    def _until(self, true: Any, within_s: float, what: str) -> None:
        try:
            netns.wait_until(true, within_s=within_s, what=what)
        except AssertionError as error:
            told = f"{self._journal.tail()}\n{self._place.logs()}"
            raise AssertionError(f"{error}\n{told}") from None


@contextlib.contextmanager
def placed(folder: Path, options: argparse.Namespace) -> Iterator[Hosts | Local]:
    """The place that the options ask for; nothing runs there yet."""
    model = small_model(folder / "model")
    if not options.hosts:
        with under_sentinel(folder) as redis:
            yield Local(folder, model, options.nodes, redis)
        return
    if why := netns.missing():
        sys.exit(f"namespace hosts: {why}")
    with hosts(folder, model=model, workers=options.hosts, fast=True) as network:
        yield Hosts(network)


def run(place: Hosts | Local, rate: float, parts: list[str]) -> Iterator[tuple[str, Any]]:
    """Each part of the day, as it ends."""
    yield "up", place.up()
    day = Day(place)
    clients = place.clients(rate)
    try:
        day.warm_up()
        names = list(place.workers)
        for number, part in enumerate(parts):
            of_all = {"update": day.update, "killed_redis": day.killed_redis}.get(part)
            yield part, of_all() if of_all else day.broken(part, names[number % len(names)])
    finally:
        clients.terminate()
        clients.wait(30)
        place.down()


def rounded(values: Any) -> Any:
    """Seconds and shares with as many digits as they are worth."""
    if isinstance(values, dict):
        return {name: rounded(value) for name, value in values.items()}
    return round(values, 3) if isinstance(values, float) else values


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--json", action="store_true", help="as every bench; prints JSON anyway")
    options.add_argument("--nodes", type=int, default=4, help="on this machine")
    options.add_argument("--hosts", type=int, default=0, help="hosts beside the head, instead")
    options.add_argument("--rate", type=float, default=8.0, help="requests a second")
    options.add_argument("--parts", nargs="*", help=f"of {Hosts.parts}, {Local.parts}; or all")
    chosen = options.parse_args()
    found: dict[str, Any] = {"engines": "fast_vllm"}
    with (
        tempfile.TemporaryDirectory(prefix="pff-") as folder,
        placed(Path(folder), chosen) as place,
    ):
        parts = list(place.parts) if chosen.parts is None else chosen.parts
        for part, figures in run(place, chosen.rate, parts):
            found[part] = rounded(figures)
            say(f"{part}: {json.dumps(found[part])}")
    print(json.dumps(found))


if __name__ == "__main__":
    main()
