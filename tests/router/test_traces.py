"""Traces from outside: every known form is read, everything else is refused with its line."""

import gzip
import json

import pytest

from prefixfleet.router import trace_ids, traces
from prefixfleet.router.synthetic_prompts import scale, text_prompt, token_prompt
from prefixfleet.router.text_blocks import BLOCK_TOKENS
from prefixfleet.router.traces import SharedBlocks, read_trace
from prefixfleet.store.errors import ConfigError

MOONCAKE = {"timestamp": 3000, "input_length": 1000, "output_length": 5, "hash_ids": [0, 7]}
BAILIAN = {
    "chat_id": 159, "parent_chat_id": 55, "timestamp": 61.5, "input_length": 33,
    "output_length": 9, "type": "text", "turn": 2, "hash_ids": [1, 2, 3],
}  # fmt: skip


def trace_file(tmp_path, *lines, name="trace.jsonl"):
    path = tmp_path / name
    text = "\n".join(line if isinstance(line, str) else json.dumps(line) for line in lines)
    path.write_bytes(gzip.compress(text.encode()) if name.endswith(".gz") else text.encode())
    return path


@pytest.mark.parametrize("name", ["trace.jsonl", "trace.jsonl.gz"])
def test_a_mooncake_trace_is_read_in_order_of_time_from_zero(tmp_path, name):
    later = MOONCAKE | {"timestamp": 4500}

    arrivals = read_trace(trace_file(tmp_path, later, "", MOONCAKE, name=name))

    assert [a.at_s for a in arrivals] == [0.0, 1.5]
    assert arrivals[0].prompt == SharedBlocks((0, 7), 1000, 512)
    assert arrivals[0].output_tokens == 5


def test_a_bailian_trace_has_seconds_and_blocks_of_16(tmp_path):
    arrivals = read_trace(trace_file(tmp_path, BAILIAN, BAILIAN | {"timestamp": 62.0}))

    assert arrivals[1].at_s == 0.5
    assert arrivals[0].prompt == SharedBlocks((1, 2, 3), 33, 16)


def test_an_openai_log_keeps_the_request(tmp_path):
    chat = {"messages": [{"role": "user", "content": "hé"}], "max_tokens": 7, "stream": True}
    batch = {"custom_id": "1", "body": {"prompt": "x"}, "timestamp": "2026-01-01T00:00:02+00:00"}

    (arrival,) = read_trace(trace_file(tmp_path, chat))
    (batched,) = read_trace(trace_file(tmp_path, batch))

    assert arrival.prompt == {"messages": chat["messages"], "max_tokens": 7}
    assert arrival.output_tokens == 7
    assert batched.prompt == {"prompt": "x"}


@pytest.mark.parametrize(
    "line",
    [
        "{", "[1]", "7", {}, {"hash_ids": [1]}, MOONCAKE | {"hash_ids": [1]},
        MOONCAKE | {"input_length": -1}, MOONCAKE | {"timestamp": "soon"},
        MOONCAKE | {"hash_ids": ["a", "b"]}, {"prompt": "x", "max_tokens": 0},
        {"prompt": "x", "timestamp": "yesterday"}, {"prompt": "x", "timestamp": -1},
        {"body": "x"}, MOONCAKE | {"hash_ids": [-1, 2]}, MOONCAKE | {"hash_ids": [1 << 63, 2]},
        MOONCAKE | {"timestamp": 1e300}, {"prompt": "x", "timestamp": 1e300},
        MOONCAKE | {"input_length": 0, "hash_ids": []},
        BAILIAN | {"input_length": 0, "hash_ids": []},
        {"prompt": ""}, {"prompt": []}, {"messages": []}, {"prompt": [""]},
        '{"timestamp": 1e999, "input_length": 0, "output_length": 0, "hash_ids": []}',
    ],
    ids=str,
)  # fmt: skip
def test_a_wrong_line_is_refused_with_its_number(tmp_path, line):
    with pytest.raises(ConfigError, match="line 2"):
        read_trace(trace_file(tmp_path, MOONCAKE, line))


@pytest.mark.parametrize(
    "line",
    [
        {"messages": 7}, {"messages": ["x"]}, {"prompt": 7}, {"prompt": [-1]},
        {"prompt": [1 << 40]}, {"prompt": [{}]}, {"prompt": [1, "x"]},
    ],
    ids=str,
)  # fmt: skip
def test_what_is_no_prompt_cannot_be_blocks(tmp_path, line):
    with pytest.raises(ConfigError, match="line 2"):
        read_trace(trace_file(tmp_path, MOONCAKE, line), as_blocks=True)


def test_a_line_without_an_end_is_refused_before_it_is_read(tmp_path, monkeypatch):
    monkeypatch.setattr(traces, "MAX_LINE_BYTES", 200)
    with pytest.raises(ConfigError, match="line 2: more than 200 bytes"):
        read_trace(trace_file(tmp_path, MOONCAKE, MOONCAKE | {"more": "x" * 10_000}))


@pytest.mark.parametrize(
    ("where", "name", "most", "line"),
    [
        (trace_ids, "MAX_IDS", 5, MOONCAKE),
        (trace_ids, "MAX_DIFFERENT", 4, BAILIAN),
        (traces, "MAX_TEXT_BYTES", 100, {"prompt": "x" * 50}),
    ],
)
def test_what_would_not_fit_is_refused_with_what_to_do(
    tmp_path, monkeypatch, where, name, most, line
):
    monkeypatch.setattr(where, name, most)
    lines = [line | {"n": number} for number in range(4)]
    if line is BAILIAN:
        lines = [line | {"hash_ids": [number, number, number]} for number in range(4)]
    path = trace_file(tmp_path, *lines)

    with pytest.raises(ConfigError, match=r"line \d: more than .* --limit"):
        read_trace(path)
    assert len(read_trace(path, limit=1)) == 1


def test_an_id_of_content_alone_counts_with_what_comes_before_it(tmp_path):
    """As in Qwen-Bailian's traces; where an id stands for a prefix it stays what it is."""
    chains = [[1, 2, 3], [4, 2, 3], [1, 2, 5], [4, 2, 3], [1, 1, 1]]
    lines = [BAILIAN | {"timestamp": t, "hash_ids": ids} for t, ids in enumerate(chains)]

    first, other, third, again, same = (
        a.prompt.ids for a in read_trace(trace_file(tmp_path, *lines))
    )

    assert (first, third) == ((1, 2, 3), (1, 2, 5))
    assert other == again
    assert other[0] == 4
    assert not set(other[1:]) & set(first)
    assert len(set(same)) == 3


def blocks_of(tmp_path, *bodies):
    return [a.prompt for a in read_trace(trace_file(tmp_path, *bodies), as_blocks=True)]


def test_texts_as_blocks_share_what_they_begin_with(tmp_path):
    system = {"role": "system", "content": "s" * 4 * BLOCK_TOKENS * 3}
    ask = [{"role": "user", "content": what} for what in ("x", "y")]

    one, other, tools = blocks_of(
        tmp_path,
        {"messages": [system, ask[0]]},
        {"messages": [system, ask[1]]},
        {"messages": [system, ask[0]], "tools": [{"type": "function"}]},
    )

    assert one.ids[:3] == other.ids[:3]
    assert one.ids[3:] != other.ids[3:]
    assert not set(one.ids) & set(tools.ids)
    assert one.block_tokens == BLOCK_TOKENS
    assert len(one.ids) == -(-one.tokens // BLOCK_TOKENS) == 4


def test_tokens_as_blocks_are_counted_exactly_and_texts_by_their_bytes(tmp_path):
    found = blocks_of(
        tmp_path, {"prompt": list(range(100))}, {"prompt": "é" * 100}, {"prompt": ["ab", "cd"]},
        {"messages": [{"role": "user", "content": [{"type": "text", "text": "hi"}]}]},
        {"messages": [{"role": "assistant", "content": None, "tool_calls": [{"id": "1"}]}]},
    )  # fmt: skip

    assert [prompt.tokens for prompt in found[:3]] == [100, 50, 1]
    assert all(prompt.ids for prompt in found)


def test_an_absent_an_empty_and_a_cut_file_are_refused(tmp_path):
    cut = tmp_path / "cut.jsonl.gz"
    cut.write_bytes(gzip.compress(json.dumps(MOONCAKE).encode() * 100)[:40])

    for path in (tmp_path / "absent", trace_file(tmp_path), cut, tmp_path):
        with pytest.raises(ConfigError, match="trace"):
            read_trace(path)


def test_prompts_agree_exactly_as_far_as_their_ids_do():
    a, b = SharedBlocks((0, 1, 2), 12, 4), SharedBlocks((0, 1, 3), 11, 4)

    left, right = token_prompt(a, range(1000, 2000)), token_prompt(b, range(1000, 2000))

    assert (len(left), len(right)) == (12, 11)
    assert left[:8] == right[:8]
    assert left[8:11] != right[8:]
    assert text_prompt(a).split()[:8] == text_prompt(b).split()[:8]
    assert token_prompt(a, range(9), seed=1) != token_prompt(a, range(9), seed=2)


def test_scaling_keeps_the_sharing_and_shrinks_the_lengths():
    prompt = SharedBlocks((0, 7), 1000, 512)

    assert scale(prompt, 1 / 16) == SharedBlocks((0, 7), 32 + 30, 32)
    assert scale(prompt, 1e-6) == SharedBlocks((0, 7), 2, 1)


@pytest.mark.parametrize("as_blocks", [False, True])
def test_a_log_with_times_in_some_lines_only_is_refused(tmp_path, as_blocks):
    timed, bare = {"prompt": "x", "timestamp": 5}, {"prompt": "y"}

    for lines in ((timed, bare), (bare, timed)):
        with pytest.raises(ConfigError, match=r"line 2: .*expected one in each line, or in none"):
            read_trace(trace_file(tmp_path, *lines), as_blocks=as_blocks)
