"""Slices of traces for a small machine: conversations that go on, short, at a steady pace."""

import trace_slices
from trace_slices import LENGTH, MOST_TOKENS, OWN_BLOCKS, found_at_most, slices

from prefixfleet.router.traces import Arrival, SharedBlocks

COUNT, PAUSE_S = 24, 1.5


def test_without_a_trace_the_slices_are_generated_and_say_so(tmp_path, monkeypatch):
    monkeypatch.setattr(trace_slices, "TRACES", tmp_path)

    ((name, parts),) = slices(COUNT, PAUSE_S, rounds=2).items()

    assert name == "generated: documents"
    for arrivals in parts:
        assert COUNT / 2 < len(arrivals) <= COUNT
        assert [arrival.at_s for arrival in arrivals] == [PAUSE_S * i for i in range(len(arrivals))]
        prompts = [arrival.prompt for arrival in arrivals]
        assert all(p.block_tokens == 512 * LENGTH and p.tokens <= MOST_TOKENS for p in prompts)
        assert found_at_most(arrivals) > 0.5
    roots = [{arrival.prompt.ids[:OWN_BLOCKS] for arrival in arrivals} for arrivals in parts]
    assert not roots[0] & roots[1]


def test_what_can_be_found_is_what_an_earlier_prompt_begins_with():
    first = Arrival(0.0, SharedBlocks((1, 2, 3), 30, 10), 1)
    second = Arrival(1.0, SharedBlocks((1, 2, 9, 3), 40, 10), 1)

    assert found_at_most([first, second]) == 20 / 70
