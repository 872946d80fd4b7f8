"""Figures of the router: ``python tests/bench/router.py --json [--peers VENV/bin]``.

Proxies are compared within one run, round by round in turn, since the machine may be shared: same
engines, same client; each proxy has one core, load generator and engines the other. The last line
is one JSON object; a peer that is not installed is null in it, and ``missing`` says why.
"""

import argparse
import json
import statistics
import sys
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from importlib.util import find_spec
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent / "support"))

from bench_decisions import measure_all
from bench_proxies import (
    Proxy,
    load,
    ours,
    python_proxy,
    rust_program,
    rust_router,
    upstreams,
)
from bench_restarts import measure_restarts
from chats import write_model
from redis_servers import new_fleet, running_server

CASES = (("plain", 64), ("stream", 64), ("pace_1", 1), ("pace_20", 64), ("pace_100", 1_000))
LEAST_ALONE = 50  # answers of one connection: of two, one would be cold
PYTHON = ("python",)
RUST = ("vllm-router", "sglang-router")
BARE = ("bare",)  # what a proxy in Python costs that does nothing at all
HOW = "pip install 'prefixfleet[bench]'"
Figures = dict[str, float]


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument("--json", action="store_true", help="for all benches alike: no effect")
    arguments.add_argument("--peers", type=Path, default=Path(sys.executable).parent)
    arguments.add_argument("--rounds", type=int, default=3)
    arguments.add_argument("--seconds", type=float, default=1.0, help="of one load")
    arguments.add_argument(
        "--blocks", type=float, default=1e6, help="in the view; 1e7 takes minutes"
    )
    chosen = arguments.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        work = Path(folder)
        blind = measure_restarts(work)
        proxies, missing = measure_proxies(work, chosen.peers, chosen.rounds, chosen.seconds)
        thinking = measure_all(work, int(chosen.blocks))
    print(
        json.dumps(summary(proxies) | thinking | blind | {"proxies": proxies, "missing": missing})
    )


def summary(proxies: dict[str, dict[str, Figures]]) -> dict[str, float | None]:
    """The ratios that the goals are about; None for what was not started."""
    streams, plain, many = proxies["stream_64"], proxies["plain_64"], proxies["pace_100_1000"]
    few, some = proxies["pace_1_1"], proxies["pace_20_64"]
    return {
        "rps_over_python_proxy": _over_best(streams, PYTHON),
        "plain_over_python_proxy": _over_best(plain, PYTHON),
        "rps_over_best_rust": _over_best(streams, RUST),
        "plain_over_best_rust": _over_best(plain, RUST),
        "plain_over_bare_proxy": _over_best(plain, BARE),
        "added_p50_ms": _added(few, "first_p50_ms"),
        "added_p99_ms": _added(few, "first_p99_ms"),
        "added_p50_ms_at_64": _added(some, "first_p50_ms"),
        "added_p99_ms_at_64": _added(some, "first_p99_ms"),
        "added_p50_ms_at_1000": _added(many, "first_p50_ms"),
        "added_p99_ms_at_1000": _added(many, "first_p99_ms"),
        "errors_at_1000_streams": many["ours"]["errors"],
    }


def _added(case: dict[str, Figures], key: str) -> float:
    return case["ours"][key] - case["direct"][key]


def _over_best(results: dict[str, Figures], names: Sequence[str]) -> float | None:
    others = [results[name]["rps"] for name in names if name in results]
    return results["ours"]["rps"] / max(others) if others else None


def measure_proxies(
    work: Path, peers: Path, rounds: int, seconds: float
) -> tuple[dict[str, dict[str, Figures]], dict[str, str]]:
    """Figures by case and proxy, and why a peer has none."""
    model, missing = write_model(work / "model"), {}
    with ExitStack() as stack:
        server = stack.enter_context(running_server(work / "redis"))
        urls = stack.enter_context(upstreams(model, 2))
        proxies: dict[str, Proxy | None] = {
            "direct": None,
            "ours": stack.enter_context(ours(urls, model, server.url, new_fleet(), work)),
            "bare": stack.enter_context(python_proxy(urls, "bench_bare_proxy.py")),
        }
        if all(map(find_spec, ("fastapi", "httpx", "uvicorn"))):
            proxies["python"] = stack.enter_context(python_proxy(urls))
        else:
            missing["python"] = HOW
        for name in RUST:
            if program := rust_program(peers, name):
                proxies[name] = stack.enter_context(rust_router(program, name, urls, work))
            else:
                missing[name] = f"not in {peers}: {HOW}"
        return compare(proxies, urls[0], rounds, seconds), missing


def compare(
    proxies: dict[str, Proxy | None], direct: str, rounds: int, seconds: float
) -> dict[str, dict[str, Figures]]:
    """Medians over rounds. A thousand streams take part in one round: they need none of others."""
    seen: dict[str, dict[str, list[Figures]]] = {}
    for number in range(rounds):
        for kind, connections in CASES:
            if connections >= 1_000 and number:
                continue
            results = seen.setdefault(f"{kind}_{connections}", {})
            for name, proxy in proxies.items():
                figures = once(proxy, direct, connections, seconds, kind)
                results.setdefault(name, []).append(figures)
        print(f"round {number + 1} of {rounds}", file=sys.stderr)
    return {
        case: {name: _medians(figures) for name, figures in results.items()}
        for case, results in seen.items()
    }


def once(proxy: Proxy | None, direct: str, connections: int, seconds: float, kind: str) -> Figures:
    """One load; ``cpu_us`` is the proxy's processor time a request."""
    before = proxy.cpu_s() if proxy else 0.0
    least = LEAST_ALONE if connections == 1 else 0
    result: dict[str, Any] = json.loads(
        load(proxy.url if proxy else direct, connections, seconds, kind, least)
    )
    if proxy:
        result["cpu_us"] = 1e6 * (proxy.cpu_s() - before) / max(1, result["requests"])
    return result


def _medians(rounds: list[Figures]) -> Figures:
    return {key: statistics.median(figures[key] for figures in rounds) for key in rounds[0]}


if __name__ == "__main__":
    main()
