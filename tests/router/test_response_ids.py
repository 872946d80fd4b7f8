"""The id of a response is read from its own place in the first bytes, and from nowhere else."""

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from prefixfleet.router.response_ids import MAX_HEARD_BYTES, MAX_ID, Ear, response_id

VLLM_EVENT = (
    b"event: response.created\n"
    b'data: {"response":{"id":"resp_1","created_at":1.5,"error":null,"instructions":"x"},'
    b'"sequence_number":0,"type":"response.created"}\n\n'
)


@pytest.mark.parametrize(
    ("answer", "expected"),
    [
        (b'{"id":"resp_1","object":"response"}', "resp_1"),
        (b' {\n "id" : "resp_1" ,', "resp_1"),
        (b'{"object":"response","created_at":-1.5e3,"error":null,"id":"resp_1"', "resp_1"),
        ('{"id":"Straße / 世界"}'.encode(), "Straße / 世界"),
        (b'{"id":"a\\"b\\\\\\u00e9"}', 'a"b\\é'),
        (b'{"id":"' + b"x" * MAX_ID + b'"', "x" * MAX_ID),
    ],
)
def test_of_a_plain_answer(answer, expected):
    assert response_id(answer, stream=False) == expected


@pytest.mark.parametrize(
    ("event", "expected"),
    [
        (VLLM_EVENT, "resp_1"),
        (VLLM_EVENT.replace(b"\n", b"\r\n"), "resp_1"),
        (b": keep-alive\n\n" + VLLM_EVENT, "resp_1"),
        (b'data:{"type":"a","id":"no","sequence_number":0,"response":{"id":"resp_1"', "resp_1"),
        (b'data: {"response":{"object":"response","id":"resp_1"', "resp_1"),
    ],
)
def test_of_a_stream(event, expected):
    assert response_id(event, stream=True) == expected


@pytest.mark.parametrize(
    "lie",
    [
        b"",
        b"{",
        b"7",
        b"[]",
        b'"id":"resp_1"',
        b'{"id":7}',
        b'{"id":null}',
        b'{"id":""}',
        b'{"id":{"id":"resp_1"}}',
        b'{"id":"resp_1',
        b'{"id":"resp_1\\"',
        b'{"id":"\\ud800"}',
        b'{"id":"\xff"}',
        b'{"id":"a\nb"}',
        b'{"id":"' + b"x" * (MAX_ID + 1) + b'"}',
        b'{"output":[{"id":"resp_1"}],"id":"resp_2"}',
        b'{"text":"{\\"id\\":\\"resp_1\\"}"}',
        b'{"error":{"id":"resp_1"}}',
        b'[{"id":"resp_1"}]',
        b'{"ID":"resp_1"}',
    ],
)
def test_what_is_elsewhere_or_no_id_is_not_read(lie):
    assert response_id(lie, stream=False) == ""
    assert response_id(b"data: " + lie, stream=True) == ""
    assert response_id(b'data: {"response":' + lie[:-1], stream=False) == ""


def test_an_id_that_a_model_wrote_into_a_stream_is_not_read():
    error = b'data: {"error":{"message":"no"}}\n\n'

    assert response_id(error + VLLM_EVENT, stream=True) == ""
    assert response_id(b'data: {"delta":"data: "}\n' + VLLM_EVENT, stream=True) == ""


@given(st.lists(st.integers(1, len(VLLM_EVENT) - 1)))
def test_wherever_the_bytes_are_cut(cuts):
    found, places = [], sorted({0, *cuts, len(VLLM_EVENT)})
    ear = Ear(stream=True, found=found.append)

    for start, end in pairwise(places):
        ear.hear(VLLM_EVENT[start:end])
    ear.hear(VLLM_EVENT.replace(b"resp_1", b"resp_2"))

    assert found == ["resp_1"]
    assert ear.done


@given(st.binary(max_size=200), st.booleans())
def test_any_bytes_are_heard(noise, stream):
    for head in (b"", b'{"id":', b'data: {"response":{'):
        found = response_id(head + noise, stream=stream)
        assert not found or b'"id"' in head + noise


@pytest.mark.parametrize("filler", [b'"a":1,', b'"a":"\\\\",', b"   ", b"\n", b"data:\n"])
def test_an_ear_gives_up(filler):
    """And takes no long time over what never ends."""
    found = []
    for stream, head in ((False, b"{"), (True, b'data: {"response":{'), (True, b"")):
        ear = Ear(stream, found.append)
        for _ in range(2 * MAX_HEARD_BYTES // len(filler)):
            ear.hear(head + filler)
            head = b""
        ear.hear(b'"id":"resp_1"}')
        assert not ear.done
    assert found == []
