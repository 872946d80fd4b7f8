"""What the encoding of blocks does to a hit, with real engines: time to first token, bytes, room.

Run: python tests/bench/encodings.py [--json] [--tokens 900] [--rounds 3] [--encodings exact,fp8]
For each encoding two nodes, a vLLM engine on CPU on each: a prompt is computed at both (at one for
a tenant of its own), pulled from the other, and found at home, the engine's own cache emptied
before. Ratios within one fleet; "load_over_home" is the share of copying from the pool into the
engine in the time of a hit at home. The last line is JSON.
"""

import argparse
import json
import statistics
import sys
import tempfile
import time
import uuid
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "support"))

from engines import Answer, Engine, Node, plan_for, running_pair, tokens_of_text
from redis_servers import running_server

from prefixfleet.cluster.model import default_cache_dir, demo_model
from prefixfleet.cluster.settings import EncodingName

BLOCK_TOKENS = 32
POOL_BYTES = 256 << 20


def timed(engine: Engine, prompt: list[int], **fields: Any) -> tuple[float, Answer]:
    """Seconds until the first token, which is all that is asked for."""
    started = time.perf_counter()
    answer = engine.ask(prompt, tokens=1, **fields)
    return time.perf_counter() - started, answer


def measure(
    nodes: dict[str, Node], engines: dict[str, Engine], prompt: list[int]
) -> dict[str, Any]:
    """One round."""
    computed_s, cold = timed(engines["b"], prompt, cache_salt=uuid.uuid4().hex)
    engines["a"].ask(prompt, tokens=1)
    nodes["a"].wait_idle(engines["a"])
    plan = plan_for(nodes["a"], len(prompt))
    pulled_s, pulled = timed(engines["b"], prompt, kv_transfer_params=plan)
    engines["b"].forget()
    before = engines["b"].load_seconds()
    home_s, home = timed(engines["b"], prompt)
    load_s = engines["b"].load_seconds() - before
    blocks = (len(prompt) - 1) // BLOCK_TOKENS
    assert pulled.outcome["pulled_blocks"] == home.outcome["local_blocks"] == blocks
    return {
        "computed_s": computed_s,
        "pulled_over_computed": pulled_s / computed_s,
        "home_over_computed": home_s / computed_s,
        "load_over_home": load_s / home_s,
        "pulled_bytes": pulled.outcome["pulled_bytes"],
        "tokens_per_gib": int(2**30 * blocks * BLOCK_TOKENS / pulled.outcome["pulled_bytes"]),
        "first_token_equal": float(cold.texts == pulled.texts == home.texts),
    }


def figures(
    encoding: EncodingName, model: Path, redis_url: str, options: argparse.Namespace
) -> Any:
    """Medians over the rounds; of the first tokens, the share that were the computed ones."""
    sizes = dict.fromkeys("ab", POOL_BYTES)
    text = tokens_of_text(model)
    with (
        tempfile.TemporaryDirectory() as folder,
        running_pair(Path(folder), model, redis_url, sizes, dict.fromkeys(sizes, encoding)) as (
            nodes,
            engines,
        ),
    ):
        rounds = []
        for number in range(options.rounds + 1):
            head = [int(digit, 16) + 300 for digit in uuid.uuid4().hex]
            rounds.append(measure(nodes, engines, (head + text)[: options.tokens]))
            if not options.json:
                print(encoding, "warm-up" if number == 0 else "", rounds[-1])
    kept = rounds[1:]  # the first compiles the kernels
    medians = {name: round(statistics.median(r[name] for r in kept), 3) for name in kept[0]}
    return medians | {"first_token_equal": statistics.fmean(r["first_token_equal"] for r in kept)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", action="store_true", help="only the last line")
    parser.add_argument("--tokens", type=int, default=900)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--encodings", default="exact,int8-fp8,fp8")
    options = parser.parse_args()
    model = demo_model(default_cache_dir(), lambda _: None)
    with tempfile.TemporaryDirectory() as redis, running_server(Path(redis)) as server:
        names = options.encodings.split(",")
        found = {name: figures(name, model, server.url, options) for name in names}
    print(json.dumps({"tokens": options.tokens, "rounds": options.rounds, "encodings": found}))


if __name__ == "__main__":
    main()
