"""Slices of traces for a small machine: conversations that go on, short, at a steady pace."""

import trace_slices
from trace_slices import LENGTH, MOST_TOKENS, slices

COUNT, PAUSE_S = 24, 1.5


def shared_tokens(arrivals):
    """Tokens that an earlier prompt of the slice begins with too."""
    known, shared = set(), 0
    for arrival in arrivals:
        ids = arrival.prompt.ids
        leading = next((i for i, block in enumerate(ids) if block not in known), len(ids))
        shared += leading * arrival.prompt.block_tokens
        known.update(ids)
    return shared


def test_without_a_trace_the_slice_is_generated_and_says_so(tmp_path, monkeypatch):
    monkeypatch.setattr(trace_slices, "TRACES", tmp_path)

    ((name, arrivals),) = slices(COUNT, PAUSE_S).items()

    assert name == "generated: documents"
    assert COUNT / 2 < len(arrivals) <= COUNT
    assert [arrival.at_s for arrival in arrivals] == [PAUSE_S * i for i in range(len(arrivals))]
    prompts = [arrival.prompt for arrival in arrivals]
    assert all(p.block_tokens == 512 * LENGTH and p.tokens <= MOST_TOKENS for p in prompts)
    assert shared_tokens(arrivals) > sum(p.tokens for p in prompts) / 2
