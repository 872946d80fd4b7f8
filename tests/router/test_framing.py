"""Answers are found whole however their bytes arrive, and what is no answer is refused."""

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from prefixfleet.router.framing import (
    BadFraming,
    Chunked,
    Length,
    UntilClose,
    framing_of,
    parse_head,
)


def cut(data: bytes, places: list[int]) -> list[bytes]:
    edges = sorted({0, len(data), *(p % (len(data) + 1) for p in places)})
    return [data[a:b] for a, b in pairwise(edges)]


def chunked(parts: list[bytes], trailer: bytes = b"") -> bytes:
    return (
        b"".join(b"%x\r\n%b\r\n" % (len(p), p) for p in parts if p) + b"0\r\n" + trailer + b"\r\n"
    )


@given(
    st.lists(st.binary(max_size=40), max_size=6),
    st.lists(st.integers(0, 500), max_size=30),
    st.sampled_from([b"", b"X-Sum: 1\r\n"]),
)
def test_chunks_cut_anywhere_give_the_body(parts, places, trailer):
    framing = Chunked()
    body = b""
    for piece in cut(chunked(parts, trailer), places):
        assert not framing.done
        body += framing.feed(piece)

    assert body == b"".join(parts)
    assert framing.done
    assert framing.at_close()


@given(st.binary(min_size=1, max_size=60), st.lists(st.integers(0, 500), max_size=9))
def test_a_length_ends_with_its_last_byte(data, places):
    framing = Length(len(data))
    body = b""
    for piece in cut(data, places):
        assert not framing.done
        body += framing.feed(piece)

    assert (body, framing.done) == (data, True)


@pytest.mark.parametrize(
    "data",
    [
        b"zz\r\n",
        b"3\x0b\r\nabc\r\n",
        b"3\n\r\nabc\r\n",
        b"-1\r\n",
        b"+3\r\nabc\r\n",
        b"0x3\r\nabc\r\n",
        b"\r\n",
        b"3\r\nabcd\r\n",
        b"3\r\nabc\rX",
        b"3\r\nabcX\n",
        b"1_0\r\n",
        b"0\r\n\r\nmore",
        b"1" * 5_000,
    ],
)
@pytest.mark.parametrize("step", [1, 2, 10_000])
def test_bad_chunks_are_refused(data, step):
    framing = Chunked()

    with pytest.raises(BadFraming):
        [framing.feed(data[i : i + step]) for i in range(0, len(data), step)]


def test_bytes_after_a_length_are_refused():
    with pytest.raises(BadFraming):
        Length(2).feed(b"abc")


def test_a_body_that_breaks_off_is_not_done():
    short, broken = Length(5), Chunked()
    short.feed(b"abc")
    broken.feed(b"5\r\nab")

    assert not short.at_close()
    assert not broken.at_close()
    assert UntilClose().at_close()


def test_the_head_is_read():
    head = parse_head(
        b"HTTP/1.1 200 OK\r\nA:  b \r\na: c\r\nX-Gr\xc3\xbc\xc3\x9fe: \xc3\xbc\r\nY: \xff"
    )
    assert head.status == 200
    assert head.headers.getall("A") == ["b", "c"]
    assert head.headers["X-Grüße"] == "ü"
    assert head.headers["Y"] == "\ufffd"
    assert head.keep_alive


@pytest.mark.parametrize(
    ("head", "kept"),
    [
        (b"HTTP/1.1 200 OK", True),
        (b"HTTP/1.1 200 OK\r\nConnection: close", False),
        (b"HTTP/1.1 200 OK\r\nConnection: keep-alive\r\nConnection: close", False),
        (b"HTTP/1.0 200 OK", False),
        (b"HTTP/1.0 200 OK\r\nConnection: Keep-Alive", True),
    ],
)
def test_whether_a_connection_is_kept(head, kept):
    assert parse_head(head).keep_alive is kept


@pytest.mark.parametrize(
    "head",
    [
        b"",
        b"HTTP/2 200 OK",
        b"SSH-2.0-x",
        b"HTTP/1.1 abc",
        b"HTTP/1.1 2",
        b"HTTP/1.1 200 OK\r\nno colon",
        b"HTTP/1.1 200 OK\r\n: empty",
        b"HTTP/1.1 200 OK\r\n folded: x",
        b"HTTP/1.1 200 OK\r\nspace : x",
        b"HTTP/1.1 200 OK\r\nna\x00me: x",
        b"HTTP/1.1 200 OK\r\nna(me: x",
        b"HTTP/1.1 200 OK\r\nname: a\x14b",
        b"HTTP/1.1 200 OK\r\nname: a\nb",
        b"HTTP/1.1 200 OK\r\nContent-Length: 3\x0b",
        b"HTTP/1.1 200 OK\r\nContent-Length: 3\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: \x0c3\r\nX: y",
        b"HTTP/1.1 200 OK\r\nname: \x7f",
        b"HTTP/1.1 600 What",
    ],
)
def test_bad_heads_are_refused(head):
    with pytest.raises(BadFraming):
        parse_head(head)


@pytest.mark.parametrize(
    ("fields", "kind"),
    [
        (b"Content-Length: 3", Length),
        (b"Content-Length: \t3 \t", Length),
        (b"Content-Length: 3\r\nContent-Length: 3", Length),
        (b"Transfer-Encoding: Chunked", Chunked),
        (b"X: y", UntilClose),
    ],
)
def test_how_a_body_ends(fields, kind):
    assert type(framing_of(parse_head(b"HTTP/1.1 200 OK\r\n" + fields))) is kind


def test_heads_of_one_kind_share_what_goes_on_to_clients():
    heads = [
        parse_head(b"HTTP/1.1 200 OK\r\nX-A: b\r\nContent-Length: %d\r\nServer: s" % n)
        for n in (1, 22)
    ]

    assert [head.length for head in heads] == [1, 22]
    assert heads[0].passing is heads[1].passing
    assert heads[0].passing.lines == "X-A: b\r\n"


def test_an_answer_without_a_body_is_done_at_once():
    assert framing_of(parse_head(b"HTTP/1.1 204 No Content")).done
    assert framing_of(parse_head(b"HTTP/1.1 200 OK\r\nContent-Length: 0")).done


@pytest.mark.parametrize(
    "fields",
    [
        b"Content-Length: -3",
        b"Content-Length: 3\r\nContent-Length: 4",
        b"Content-Length: x",
        b"Content-Length: 3\xc2\xa0",
        b"Transfer-Encoding: chunked\r\nTransfer-Encoding: gzip",
        b"Transfer-Encoding: chunked\r\nTransfer-Encoding: chunked",
        b"Transfer-Encoding: \xc2\xa0chunked",
        b"Transfer-Encoding: gzip, chunked",
        b"Transfer-Encoding: chunked\r\nContent-Length: 3",
    ],
)
def test_contradictions_are_refused(fields):
    with pytest.raises(BadFraming):
        framing_of(parse_head(b"HTTP/1.1 200 OK\r\n" + fields))
