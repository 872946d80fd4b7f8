"""Bytes to feed to parsers: right ones with edits, MessagePack and JSON of any shape, and noise."""

import json
from collections.abc import Sequence

import msgpack
from hypothesis import strategies as st

ODD = (
    b"", b"\0", b"\xff", b"\xc1", b"\x91", b"\xdd\xff\xff\xff\xff", b"[", b"{", b'"', b"null",
    b"1e999", b"-1", b"NaN", b"\xed\xa0\x80", b"\r\n", b"\xd6\xff\0\0\0\0",
)  # fmt: skip

_leaves = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(2**63), 2**64 - 1),
    st.floats(),
    st.binary(max_size=40),
    st.text(max_size=20),
)


def _containers(inner: st.SearchStrategy) -> st.SearchStrategy:
    keys = st.one_of(st.text(max_size=8), st.sampled_from(["op", "ask", "type", "version", "id"]))
    return st.one_of(st.lists(inner, max_size=4), st.dictionaries(keys, inner, max_size=4))


values = st.recursive(_leaves, _containers, max_leaves=12)


@st.composite
def edited(draw: st.DrawFn, seeds: Sequence[bytes]) -> bytes:
    """A seed with a few pieces cut out, replaced, repeated or put in."""
    data = draw(st.sampled_from(seeds))
    for _ in range(draw(st.integers(1, 4))):
        start = draw(st.integers(0, len(data)))
        end = min(len(data), start + draw(st.integers(0, 24)))
        piece = draw(st.one_of(st.sampled_from(ODD), st.binary(max_size=8)))
        data = data[:start] + piece * draw(st.integers(1, 3)) + data[end:]
    return data


@st.composite
def _with_one_value_changed(draw: st.DrawFn, seeds: Sequence[bytes]) -> bytes:
    """A MessagePack or JSON seed in which one value somewhere is another one."""
    data = draw(st.sampled_from(seeds))
    try:
        tree, pack = msgpack.unpackb(data), msgpack.packb
    except ValueError:
        try:
            tree, pack = json.loads(data), lambda t: json.dumps(t, default=str).encode()
        except ValueError:
            return data
    packed: bytes = pack(draw(_changed(tree)))
    return packed


@st.composite
def _changed(draw: st.DrawFn, tree: object) -> object:
    if isinstance(tree, dict) and tree and draw(st.booleans()):
        key = draw(st.sampled_from(sorted(tree, key=str)))
        return {**tree, key: draw(_changed(tree[key]))}
    if isinstance(tree, list) and tree and draw(st.booleans()):
        at = draw(st.integers(0, len(tree) - 1))
        return [*tree[:at], draw(_changed(tree[at])), *tree[at + 1 :]]
    return draw(values)


nested = st.builds(
    lambda opening, depth, inner: opening * depth + inner,
    st.sampled_from([b"\x91", b"\x81\xa1a", b"[", b'{"a":']),
    st.sampled_from([10, 400, 600, 1_000, 2_000, 100_000]),
    st.sampled_from([b"\xc0", b"1", b""]),
)


def hostile_bytes(seeds: Sequence[bytes]) -> st.SearchStrategy[bytes]:
    """What a parser whose right inputs are ``seeds`` must survive."""
    return st.one_of(
        edited(seeds),
        _with_one_value_changed(seeds),
        values.map(msgpack.packb),
        values.map(lambda v: json.dumps(v, default=repr).encode()),
        st.builds(lambda seed, deep: seed + deep, st.sampled_from([b"", *seeds]), nested),
        st.binary(max_size=200),
    )
