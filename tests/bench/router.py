"""Figures of the router: ``python tests/bench/router.py --json [--peers VENV/bin]``.

Ratios of proxies are taken in one run, round by round in turn, since the machine is shared; each
proxy has one core, load generator and engines the other. The last line is one JSON object.
"""

import argparse
import json
import statistics
import sys
import tempfile
from contextlib import ExitStack
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent / "support"))

from bench_decisions import measure_all
from bench_proxies import Proxy, load, ours, python_proxy, rust_router, upstreams
from chats import write_model
from redis_servers import new_fleet, running_server

ROUNDS = 5
SECONDS = 2.0
CASES = (("plain", 32), ("stream", 32), ("paced", 8), ("paced", 1_000))
RUST = ("vllm-router", "sglang-router")


def main() -> None:
    arguments = argparse.ArgumentParser()
    arguments.add_argument("--json", action="store_true")
    arguments.add_argument("--peers", type=Path, help="bin folder with vllm-router, sglang-router")
    arguments.add_argument("--rounds", type=int, default=ROUNDS)
    arguments.add_argument("--blocks", type=float, default=1e6, help="blocks in the view")
    chosen = arguments.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        work = Path(folder)
        thinking = measure_all(work, int(chosen.blocks))
        proxies = measure_proxies(work, chosen.peers, chosen.rounds)
    print(json.dumps(summary(proxies) | thinking | {"proxies": proxies}))


def summary(proxies: dict[str, Any]) -> dict[str, float | None]:
    """The ratios that the goals are about; None for what was not started."""
    streams, plain = proxies["stream_32"], proxies["plain_32"]
    return {
        "rps_over_python_proxy": streams["ours"]["rps"] / streams["python"]["rps"],
        "plain_rps_over_python_proxy": plain["ours"]["rps"] / plain["python"]["rps"],
        "rps_over_best_rust": _over_best(streams),
        "plain_rps_over_best_rust": _over_best(plain),
        "added_p50_ms": proxies["paced_8"]["ours"]["first_p50_ms"]
        - proxies["paced_8"]["direct"]["first_p50_ms"],
        "errors_at_1000_streams": proxies["paced_1000"]["ours"]["errors"],
    }


def _over_best(results: dict[str, dict[str, float]]) -> float | None:
    rust = [results[name]["rps"] for name in RUST if name in results]
    return results["ours"]["rps"] / max(rust) if rust else None


def measure_proxies(work: Path, peers: Path | None, rounds: int) -> dict[str, Any]:
    model = write_model(work / "model")
    with ExitStack() as stack:
        server = stack.enter_context(running_server(work / "redis"))
        urls = stack.enter_context(upstreams(model, 2))
        proxies = {
            "ours": stack.enter_context(ours(urls, model, server.url, new_fleet(), work)),
            "python": stack.enter_context(python_proxy(urls)),
        }
        for name in RUST if peers else ():
            proxies[name] = stack.enter_context(rust_router(peers, name, urls, work))
        return compare(proxies, urls[0], rounds)


def compare(proxies: dict[str, Proxy], direct: str, rounds: int) -> dict[str, Any]:
    """Medians over rounds, and ratios to ours taken within each round."""
    seen: dict[tuple[str, int, str], list[dict[str, float]]] = {}
    for number in range(rounds):
        for kind, connections in CASES:
            for name, proxy in [("direct", None), *proxies.items()]:
                if connections == 1_000 and name not in ("direct", "ours"):
                    continue  # others fail or take minutes; ours must do neither
                seen.setdefault((kind, connections, name), []).append(
                    once(proxy, direct, connections, kind)
                )
        print(f"round {number + 1} of {rounds}", file=sys.stderr)
    return {
        f"{kind}_{connections}": {
            name: {key: statistics.median(r[key] for r in results) for key in results[0]}
            for (k, c, name), results in seen.items()
            if (k, c) == (kind, connections)
        }
        for kind, connections in CASES
    }


def once(proxy: Proxy | None, direct: str, connections: int, kind: str) -> dict[str, float]:
    before = proxy.cpu_s() if proxy else 0.0
    result: dict[str, float] = json.loads(
        load(proxy.url if proxy else direct, connections, SECONDS, kind)
    )
    if proxy:
        result["cpu_us"] = 1e6 * (proxy.cpu_s() - before) / max(1, result["requests"])
    return result


if __name__ == "__main__":
    main()
