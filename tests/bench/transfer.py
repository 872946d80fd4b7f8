"""Figures of the transfer plane: pulls over each link beside sockets, UCX's own test and rivals.

Run: python tests/bench/transfer.py [--json] [--rounds 7] [--collective]
Two processes on loopback, in a network namespace of their own where that is allowed (so that the
host's congestion control does not decide). In each round everybody pulls in turn; figures are
medians over the rounds, ratios are medians of the rounds' ratios. Ours are whole pulls: lease,
read, proof of every checksum, commit; the others move bytes. Blocks lie in slots of exactly
their size. Both ends run on uvloop, as nodes do under Ray. Rivals install with
`pip install -e .[bench]`; who is absent is null, and says why. The last line is one JSON object.
"""

import argparse
import contextlib
import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path
from statistics import median

sys.path += [str(Path(__file__).parents[2]), str(Path(__file__).parents[1] / "support")]

import uvloop
from links import MAKERS

from prefixfleet.transfer.ucx_binding import available
from tests.bench import transfer_collective
from tests.bench.transfer_figures import Figures, size_bytes
from tests.bench.transfer_ours import Ours, Source
from tests.bench.transfer_peers import SIZES
from tests.bench.transfer_rivals import PERFTESTS, SAME_TERMS, Absent, Peer, Perftest, RawSocket
from tests.bench.transfer_source import filled_node, pool_node

PULLS = {"64KiB": 6, "1MiB": 3, "16MiB": 1, "setup": 20}
"""Of one round."""
MOVED = [size for size in SIZES if size != "setup"]
IN_NAMESPACE = "PREFIXFLEET_BENCH_NAMESPACE"


class Bench:
    """Everybody who takes part, and what they did."""

    def __init__(self, stack):
        self._stack = stack
        self.figures = Figures()
        self.perftest: dict[str, list[float]] = {test: [] for test in PERFTESTS}
        self.over_perftest = []
        self.absent = {}
        self._ours, self._rivals = {}, {}

    async def start(self):
        kinds = [kind for kind in ("tcp", "ucx", "shm") if self._usable(kind)]
        self._source = Source(kinds)
        self._stack.callback(self._source.close)
        self._nodes = {size: pool_node(size, "target") for size in SIZES}
        self._expected = {size: filled_node(size).segment for size in SIZES}
        for kind in kinds:
            ours = Ours(kind, self._source.told["contacts"][kind], self._nodes)
            self._stack.push_async_callback(ours.close)
            await ours.prove(self._expected)
            self._ours[kind] = ours
        self._raw = RawSocket(self._source.told["raw"])
        self._stack.callback(self._raw.close)
        makers = {
            "perftest": Perftest,
            "mooncake": lambda: Peer("mooncake"),
            "nixl": lambda: Peer("nixl"),
        }
        for name, make in makers.items():
            try:
                self._rivals[name] = make()
            except Absent as absent:
                self.absent[name] = str(absent)
            else:
                self._stack.callback(self._rivals[name].close)

    def _usable(self, kind):
        if kind not in MAKERS:
            self.absent[kind] = "there is no such link"
        elif kind == "ucx" and "ucxx" not in available():
            self.absent[kind] = "the Python binding ucxx of UCX is not installed"
        return kind not in self.absent

    async def round(self):
        for kind, ours in self._ours.items():
            for size in SIZES:
                cpu = self._cpu()
                seconds = [await ours.pull(size) for _ in range(PULLS[size])]
                self.figures.add(kind, size, seconds, self._cpu(cpu))
        for size in MOVED:
            cpu = self._cpu()
            seconds = [self._raw.pull(size, self._nodes[size].segment) for _ in range(PULLS[size])]
            self.figures.add("raw_socket", size, seconds, self._cpu(cpu))
            self._play("memcpy", size, self._copy)
            for name in ("mooncake", "nixl"):
                if name in self._rivals:
                    self._play(name, size, self._rivals[name].pull)
        if "perftest" in self._rivals:
            self._run_perftest()

    def _play(self, name, size, pull):
        self.figures.add(name, size, [pull(size) for _ in range(PULLS[size])], [])

    def _copy(self, size):
        block, count = SIZES[size]
        source, target = self._expected[size], self._nodes[size].segment
        started = time.perf_counter()
        for at in range(0, block * count, block):
            target[at : at + block] = source[at : at + block]
        return time.perf_counter() - started

    def _run_perftest(self):
        speeds = {}
        for test, seen in self.perftest.items():
            speeds[test] = self._rivals["perftest"].gb_per_s(test)
            seen.append(speeds[test])
        if "ucx" in self._ours:
            ours = size_bytes("1MiB") / median(self.figures.seconds["ucx", "1MiB"][-1]) / 1e9
            self.over_perftest.append({test: ours / speed for test, speed in speeds.items()})

    def _cpu(self, since=(0.0, 0.0)):
        return time.process_time() - since[0], self._source.cpu_s() - since[1]

    def result(self):
        figures = self.figures
        ratios = {
            test: round(median(pair[test] for pair in self.over_perftest), 3)
            for test in self.perftest
            if self.over_perftest
        }
        best = max(self._ours.keys() & {"tcp", "ucx"}, key=lambda kind: figures.ratio(kind, "tcp"))
        whos = dict.fromkeys(who for who, _ in figures.seconds)
        return {
            "ours_over_raw_socket": figures.ratio("tcp", "raw_socket"),
            "ours_over_raw_socket_16mib": figures.ratio("tcp", "raw_socket", "16MiB"),
            "ours_ucx_over_perftest": min(ratios.values(), default=None),  # its fastest
            "ours_ucx_over_perftest_on_our_terms": ratios.get(SAME_TERMS),
            "ours_ucx_over_perftest_by_test": ratios or None,
            "ours_over_mooncake": figures.ratio(best, "mooncake"),
            "ours_over_nixl": figures.ratio(best, "nixl"),
            "shm_over_memcpy": figures.ratio("shm", "memcpy"),
            "best_network_link": best,
            "setup_p50_ms": {kind: figures.summary(kind, "setup")["p50_ms"] for kind in self._ours},
            "perftest_gb_per_s": {t: round(median(s), 2) for t, s in self.perftest.items() if s},
            "absent": self.absent,
            "network": os.environ.get(IN_NAMESPACE, "the host's"),
            "pulls": {
                who: {s: figures.summary(who, s) for s in SIZES if (who, s) in figures.seconds}
                for who in whos
            },
        }


def enter_namespace():
    """Start over in a network namespace with its own loopback, if that is allowed here."""
    inside = "ip link set lo up && sysctl -qw net.ipv4.tcp_congestion_control=reno"
    wrap = ["unshare", "--net", "sh", "-c"]
    if IN_NAMESPACE in os.environ or not shutil.which("unshare"):
        return
    if subprocess.run([*wrap, inside], capture_output=True).returncode:
        return
    os.environ[IN_NAMESPACE] = "own namespace, reno"
    again = [*wrap, f'{inside} && exec "$@"', "sh", sys.executable, *sys.argv]
    os.execvp("unshare", again)


async def measure(rounds, say):
    async with contextlib.AsyncExitStack() as stack:
        bench = Bench(stack)
        await bench.start()
        for number in range(rounds):
            await bench.round()
            say(f"round {number + 1} of {rounds}")
        return bench.result()


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", action="store_true", help="print the JSON line only")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument(
        "--collective", action="store_true", help="only a broadcast to four nodes against pulls"
    )
    args = parser.parse_args()
    if args.collective:
        print(json.dumps({"collective": transfer_collective.measure(args.rounds)}))
        return
    enter_namespace()
    say = (lambda text: None) if args.json else (lambda text: print(text, flush=True))
    print(json.dumps(uvloop.run(measure(args.rounds, say))))


if __name__ == "__main__":
    main()
