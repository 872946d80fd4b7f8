"""What the short way may take: only what the full parser would understand in the same way."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from prefixfleet.router.plain_request import (
    MAX_BODY_BYTES,
    MAX_HEAD_BYTES,
    NotPlain,
    plain_head,
)

HEAD = (
    b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nX-Name:  \xc3\xa9 a\t\r\n"
    b"content-length: 12\r\nConnection: Keep-Alive\r\n\r\n"
)


def test_a_head_gives_path_headers_and_where_the_body_is():
    head = plain_head(HEAD + b"{}")

    assert head is not None
    assert (head.fields.path, head.start, head.body_bytes) == ("/v1/completions", len(HEAD), 12)
    assert dict(head.fields.headers) == {
        "Host": "x",
        "X-Name": "\xe9 a",
        "Connection": "Keep-Alive",
    }


def test_heads_that_differ_in_the_length_of_the_body_are_read_once():
    one, other = plain_head(HEAD), plain_head(HEAD.replace(b"12", b" 7\t"))

    assert one is not None
    assert other is not None
    assert (one.body_bytes, other.body_bytes) == (12, 7)
    assert one.fields is other.fields
    lines = one.fields.worker_lines(True)
    assert lines == "X-Name: \xe9 a\r\nAccept-Encoding: identity\r\n"
    assert one.fields.worker_lines(True) is lines


def test_a_key_goes_on_to_a_worker_only_where_it_should():
    head = HEAD.replace(b"Host: x\r\n", b"Host: x\r\nAuthorization: Bearer abc\r\n")
    found = plain_head(head)

    assert found is not None
    assert "abc" in found.fields.worker_lines(True)
    assert "abc" not in found.fields.worker_lines(False)
    assert "abc" in found.fields.worker_lines(True)


@given(st.integers(0, len(HEAD) - 1))
def test_a_part_of_a_head_wants_more(size):
    assert plain_head(HEAD[:size]) is None


@pytest.mark.parametrize(
    "data",
    [
        HEAD.replace(b"POST", b"GET"),
        HEAD.replace(b"HTTP/1.1", b"HTTP/1.0"),
        HEAD.replace(b"completions", b"completions?a=1"),
        HEAD.replace(b"completions", b"%63ompletions"),
        HEAD.replace(b"Host: x\r\n", b""),
        HEAD.replace(b"Host: x\r\n", b"Host: x\r\nhost: y\r\n"),
        HEAD.replace(b"Host: x\r\n", b"Host : x\r\n"),
        HEAD.replace(b"Host: x\r\n", b"Host: x\r\n folded\r\n"),
        HEAD.replace(b"Host: x\r\n", b"Host: x\nEvil: y\r\n"),
        HEAD.replace(b"Host: x\r\n", b"Host: x\0\r\n"),
        HEAD.replace(b"Host: x\r\n", b"Host: x\r\r\n"),
        HEAD.replace(b"Host: x\r\n", b"Host: x\r\nTransfer-Encoding: chunked\r\n"),
        HEAD.replace(b"Host: x\r\n", b"Host: x\r\nContent-Length: 3\r\n"),
        HEAD.replace(b"Host: x\r\n", b"Host: x\r\nExpect: 100-continue\r\n"),
        HEAD.replace(b"Host: x\r\n", b"Host: x\r\nContent-Encoding: gzip\r\n"),
        HEAD.replace(b"Keep-Alive", b"close"),
        HEAD.replace(b"Keep-Alive", b"keep-alive, x-name"),
        HEAD.replace(b"12", b"-12"),
        HEAD.replace(b"12", b"1 2"),
        HEAD.replace(b"12", b"\xd9\xa1"),
        HEAD.replace(b"12", str(MAX_BODY_BYTES + 1).encode()),
        HEAD.replace(b" a\t", b"a" * MAX_HEAD_BYTES),
        b"\r\n" + HEAD,
        b"\x16\x03\x01",
    ],
)
def test_what_is_unusual_is_left_to_the_full_parser(data):
    with pytest.raises(NotPlain):
        plain_head(data)


@given(st.binary(max_size=200), st.integers(0, len(HEAD)))
def test_any_bytes_are_plain_or_not(junk, at):
    try:
        head = plain_head(HEAD[:at] + junk + HEAD[at:])
    except NotPlain:
        return
    assert head is None or 0 < head.start <= MAX_HEAD_BYTES + 4
