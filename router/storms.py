"""Hot-spot storms: everybody asks about one text that nobody has seen before. Pure."""

import random
from collections.abc import Sequence

from prefixfleet.router.traces import Arrival, SharedBlocks

REQUESTS = 200
PER_S = 20.0
HOT_TOKENS = 25_600
OWN_TOKENS = 1_024
OUTPUT_TOKENS = 100


def with_storms(
    arrivals: Sequence[Arrival], at_s: Sequence[float], *, seed: int, lead_s: float = 0.0
) -> list[Arrival]:
    """``arrivals``, of block ids, with a storm at each of ``at_s``: 200 requests in about ten
    seconds that share 25,600 tokens of a new text, each with a question of its own. The first of
    them comes ``lead_s`` before the others: then one node holds the text when all want it."""
    prompts = [a.prompt for a in arrivals if isinstance(a.prompt, SharedBlocks)]
    fresh = 1 + max(block for prompt in prompts for block in prompt.ids)
    block_tokens = prompts[0].block_tokens
    hot, own = (max(1, tokens // block_tokens) for tokens in (HOT_TOKENS, OWN_TOKENS))
    draw, storms = random.Random(seed), []
    for start_s in at_s:
        text, fresh, now = range(fresh, fresh + hot), fresh + hot, start_s
        for number in range(REQUESTS):
            ids = (*text, *range(fresh, fresh + own))
            prompt = SharedBlocks(ids, len(ids) * block_tokens, block_tokens)
            storms.append(Arrival(now if number else max(0.0, now - lead_s), prompt, OUTPUT_TOKENS))
            fresh += own
            now += draw.expovariate(PER_S)
    return sorted([*arrivals, *storms], key=lambda arrival: arrival.at_s)
