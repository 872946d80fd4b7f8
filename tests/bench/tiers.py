"""Time to first token of one prompt with a real engine: computed, found in memory, found on disk.

Run: python tests/bench/tiers.py [--json] [--tokens 900] [--rounds 3] [--dir FOLDER]
One node with a small pool and a disk tier, one vLLM engine on CPU whose own cache is emptied before
each question. Ratios within one run; every answer must be the computed one. The last line is JSON.
"""

import argparse
import json
import statistics
import sys
import tempfile
import time
import uuid
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "support"))

from engines import Engine, Node, running_pair, wait_until
from redis_servers import running_server
from tokenizers import Tokenizer

from prefixfleet.cluster.model import default_cache_dir, demo_model

BLOCK_TOKENS = 32
POOL_BYTES = 64 << 20  # 43 blocks of this model


def prompts(model: Path, count: int, length: int) -> list[list[int]]:
    """Each starts with something nobody has seen."""
    text = (Path(__file__).parents[2] / "DESIGN.md").read_text()
    tokens = Tokenizer.from_file(str(model / "tokenizer.json")).encode(text).ids
    heads = [[int(digit, 16) + 300 for digit in uuid.uuid4().hex] for _ in range(count)]
    return [(head + tokens)[:length] for head in heads]


def ask(engine: Engine, prompt: list[int]) -> tuple[float, str]:
    engine.forget()
    started = time.perf_counter()
    answer = engine.ask(prompt, tokens=1)
    return time.perf_counter() - started, answer.texts[0]


def settle(node: Node, engine: Engine) -> None:
    """Until everything computed is in the index, and what had to go is on disk."""
    node.wait_idle(engine)
    wait_until(
        lambda: (
            not (
                node.status()["stats"]["tiers"]["dram"]["leaving"]
                or node.status()["stats"]["tiers"]["ssd"]["waiting_blocks"]
            )
        )
    )


def read_blocks(node: Node) -> int:
    return int(node.status()["stats"]["tiers"]["ssd"]["read_blocks"])


def measure(node: Node, engine: Engine, asked: list[list[int]]) -> dict[str, float]:
    """One round: the first prompt is measured, the others push it out of memory."""
    prompt, *others = asked
    computed_s, wanted = ask(engine, prompt)
    settle(node, engine)
    before = read_blocks(node)
    memory_s, from_memory = ask(engine, prompt)
    assert read_blocks(node) == before, "the memory hit came from disk"
    for other in others:
        ask(engine, other)
        settle(node, engine)
    before = read_blocks(node)
    disk_s, from_disk = ask(engine, prompt)
    assert wanted == from_memory == from_disk, "an answer from the cache is another one"
    on_disk = read_blocks(node) - before
    assert on_disk > len(prompt) // BLOCK_TOKENS // 2, f"only {on_disk} blocks came from disk"
    return {"computed_s": computed_s, "dram_s": memory_s, "ssd_s": disk_s, "ssd_blocks": on_disk}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", action="store_true", help="only the last line")
    parser.add_argument("--tokens", type=int, default=900)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--dir", type=Path, help="folder on the disk to measure")
    options = parser.parse_args()
    model = demo_model(default_cache_dir(), lambda _: None)
    rounds = []
    with (
        tempfile.TemporaryDirectory() as redis,
        tempfile.TemporaryDirectory() as runtime,
        tempfile.TemporaryDirectory(dir=options.dir) as disk,
        running_server(Path(redis)) as server,
    ):
        environ = {"PREFIXFLEET_NODE_SSD_PATH": disk, "PREFIXFLEET_NODE_SSD_BYTES": str(2 << 30),
                   "PREFIXFLEET_NODE_EVICTION": "lru"}  # fmt: skip
        sizes = {"a": POOL_BYTES}
        with running_pair(Path(runtime), model, server.url, sizes, environ=environ) as (
            nodes,
            engines,
        ):
            ask(engines["a"], prompts(model, 1, 200)[0])  # compiles, and makes the first bucket
            for _ in range(options.rounds):
                asked = prompts(model, 3, options.tokens)
                rounds.append(measure(nodes["a"], engines["a"], asked))
                if not options.json:
                    print(rounds[-1])
    figures = {name: round(statistics.median(r[name] for r in rounds), 3) for name in rounds[0]}
    figures["dram_over_computed"] = round(figures["dram_s"] / figures["computed_s"], 3)
    figures["ssd_over_computed"] = round(figures["ssd_s"] / figures["computed_s"], 3)
    print(json.dumps(figures | {"tokens": options.tokens, "rounds": options.rounds}))


if __name__ == "__main__":
    main()
