"""What reuse of the tokens before a divergence inside a block would give, beside whole blocks.

Run: python tests/bench/partial_blocks.py [--json] [TRACE] [--block-tokens 16,32,64,512]

On a trace with block ids and lengths (Mooncake's format) and a cache that forgets nothing: a
request that goes on from an earlier one, whose whole blocks it repeats, shares that one's prompt
and answer to the token. What it reuses is cut at a block's end (as engines do), or not at all. A
request that branches off elsewhere is counted as sharing what its ids prove, both ways; it could
gain one block less a token at most, which is the second figure. The last line is one JSON object:
reused tokens over prompt tokens, by block size.
"""

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

sys.path.insert(0, str(Path(__file__).parents[1] / "support"))

from traces import CONVERSATION

from prefixfleet.router.traces import Arrival, SharedBlocks, read_trace
from prefixfleet.store.errors import ConfigError


class Shared(NamedTuple):
    """Tokens of a prompt that an earlier request had, as far as the trace proves it."""

    prompt: int
    tokens: int
    exact: bool  # it goes on from an earlier request; else there may be more, inside a block


class _Past(NamedTuple):
    prompt: int
    output: int


def shared(arrivals: Sequence[Arrival]) -> list[Shared]:
    """Of each request, with every earlier one still there."""
    last: dict[int, _Past] = {}  # by block, the latest request with it
    found = []
    for arrival in arrivals:
        prompt = arrival.prompt
        assert isinstance(prompt, SharedBlocks), "only traces of block ids are of use here"
        known = next((i for i, name in enumerate(prompt.ids) if name not in last), len(prompt.ids))
        before = last[prompt.ids[known - 1]] if known else _Past(0, 0)
        # the last block of a trace's prompt is partial: another id as soon as the prompt goes on
        goes_on = known > 0 and known >= before.prompt // prompt.block_tokens
        proved = max(known * prompt.block_tokens, (before.prompt + before.output) * goes_on)
        found.append(Shared(prompt.tokens, min(proved, prompt.tokens - 1), goes_on))
        past = _Past(prompt.tokens, arrival.output_tokens)
        last.update(dict.fromkeys(prompt.ids, past))
    return found


def figures(found: list[Shared], block_tokens: int) -> dict[str, float]:
    prompts = sum(s.prompt for s in found)
    whole = sum(s.tokens // block_tokens * block_tokens for s in found)
    partial = sum(s.tokens for s in found if s.exact)
    partial += sum(s.tokens // block_tokens * block_tokens for s in found if not s.exact)
    bound = partial + sum(block_tokens - 1 for s in found if not s.exact)
    return {
        "whole_blocks": round(whole / prompts, 5),
        "partial_blocks": round(partial / prompts, 5),
        "at_most": round(bound / prompts, 5),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("trace", nargs="?", type=Path, default=CONVERSATION)
    parser.add_argument("--json", action="store_true", help="only the last line")
    parser.add_argument("--block-tokens", default="16,32,64,512")
    options = parser.parse_args()
    if not options.trace.is_file():
        parser.error(f"no trace at {options.trace}: name one, or set TRACES_DIR to its folder")
    try:
        sizes = [int(size) for size in options.block_tokens.split(",")]
        if min(sizes) < 1:
            raise ValueError
    except ValueError:
        parser.error(f"--block-tokens: got {options.block_tokens!r}, expected numbers as 16,32")
    try:
        arrivals = read_trace(options.trace)
    except ConfigError as error:
        parser.error(str(error))
    found = shared(arrivals)
    results = {size: figures(found, size) for size in sizes}
    if not options.json:
        for size, result in results.items():
            print(f"blocks of {size:4}: " + ", ".join(f"{k} {v:.4f}" for k, v in result.items()))
    print(json.dumps({str(size): result for size, result in results.items()}))


if __name__ == "__main__":
    main()
