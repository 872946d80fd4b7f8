"""The router's hint to a node: what arrives is what was sent, by somebody who knows the secret."""

import msgpack
import pytest

from prefixfleet.store.errors import PeerRefused, ProtocolError
from prefixfleet.store.prefetch import Prefetch, encode_prefetch, open_prefetch, prefetch_key, sign
from prefixfleet.store.records import PullPlan

KEY = prefetch_key(b"a secret of enough bytes")
HINT = Prefetch(
    plan=PullPlan(request="r1", source="node-b", source_epoch=7, blocks=2),
    namespace=b"n" * 16,
    chain=(b"a" * 16, b"b" * 16),
)


def test_what_is_opened_is_what_was_sent():
    body = encode_prefetch(HINT)

    assert open_prefetch(body, sign(body, KEY), KEY) == HINT


@pytest.mark.parametrize("signature", ["", "00", "é" * 64, "0" * 64])
def test_a_wrong_signature_is_refused(signature):
    with pytest.raises(PeerRefused, match="cluster secret"):
        open_prefetch(encode_prefetch(HINT), signature, KEY)


def test_the_key_of_another_secret_is_refused():
    body = encode_prefetch(HINT)

    with pytest.raises(PeerRefused):
        open_prefetch(body, sign(body, prefetch_key(b"another secret of a fleet")), KEY)


def test_a_changed_byte_is_refused():
    body = encode_prefetch(HINT)
    changed = body[:-1] + bytes([body[-1] ^ 1])

    with pytest.raises(PeerRefused):
        open_prefetch(changed, sign(body, KEY), KEY)


@pytest.mark.parametrize(
    "values",
    [
        b"",
        7,
        [],
        {},
        {"version": 99},
        {"version": 1, "plan": b"", "namespace": b"", "chain": b""},
        {"version": 1, "plan": HINT.plan.encode(), "namespace": b"", "chain": b"123"},
        {"version": 1, "plan": HINT.plan.encode(), "namespace": b"", "chain": "text"},
        {"version": 1, "plan": HINT.plan.encode(), "namespace": "text", "chain": b""},
    ],
)
def test_signed_junk_is_a_protocol_error(values):
    body = msgpack.packb(values) if not isinstance(values, bytes) else values

    with pytest.raises(ProtocolError):
        open_prefetch(body, sign(body, KEY), KEY)
