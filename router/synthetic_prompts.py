"""Prompts made from a trace's block ids: right lengths, right sharing, same bytes every time.

A trace tells only what its prompts share. Here every block id becomes a run of words (or token
ids) of its own, drawn from a generator seeded by the id, so that two prompts agree exactly as
far as their ids do.
"""

import random
from collections.abc import Sequence

from prefixfleet.router.traces import SharedBlocks

WORDS = (
    "the a this that one two time year day way man world life hand part place case week work "
    "group number night point home water room area money story fact month lot right study book "
    "eye job word business issue side kind head house service friend father power hour game line "
    "end member law car city name team minute idea body back parent face level office door health "
    "person art war history party result change morning reason research girl guy moment air "
    "teacher force order"
).split()
"""Short common words: a subword tokenizer has one token for each with the space before it."""


def scale(prompt: SharedBlocks, factor: float) -> SharedBlocks:
    """The same sharing with every block ``factor`` as long, at least one token a block."""
    block_tokens = max(1, round(prompt.block_tokens * factor))
    full, tail = divmod(prompt.tokens, prompt.block_tokens)
    tail_tokens = max(1, round(tail * factor)) if tail else 0
    return SharedBlocks(prompt.ids, full * block_tokens + tail_tokens, block_tokens)


def token_prompt(prompt: SharedBlocks, vocabulary: range, seed: int = 0) -> list[int]:
    """``prompt.tokens`` token ids out of ``vocabulary``: the exact length, for /v1/completions."""
    tokens: list[int] = []
    for block_id, length in _lengths(prompt):
        source = random.Random(f"{seed}/{block_id}")
        tokens += source.choices(vocabulary, k=length)
    return tokens


def text_prompt(prompt: SharedBlocks, seed: int = 0) -> str:
    """About ``prompt.tokens`` tokens of text: one word a token, for endpoints that take text."""
    words: list[str] = []
    for block_id, length in _lengths(prompt):
        words += random.Random(f"{seed}/{block_id}").choices(WORDS, k=length)
    return " ".join(words)


def _lengths(prompt: SharedBlocks) -> Sequence[tuple[int, int]]:
    full = prompt.tokens // prompt.block_tokens
    tail = prompt.tokens - full * prompt.block_tokens
    return [
        (block_id, prompt.block_tokens if i < full else tail)
        for i, block_id in enumerate(prompt.ids)
    ]
