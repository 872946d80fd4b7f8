"""Traces from outside: every known form is read, everything else is refused with its line."""

import gzip
import json

import pytest

from prefixfleet.router.synthetic_prompts import scale, text_prompt, token_prompt
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
        {"body": "x"},
    ],
    ids=str,
)  # fmt: skip
def test_a_wrong_line_is_refused_with_its_number(tmp_path, line):
    with pytest.raises(ConfigError, match="line 2"):
        read_trace(trace_file(tmp_path, MOONCAKE, line))


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
