"""A wish to keep a prefix: what arrives is what was sent, by somebody who knows the secret."""

import msgpack
import pytest

from prefixfleet.store.errors import PeerRefused, ProtocolError
from prefixfleet.store.keep import Keep, encode_keep, keep_key, open_keep
from prefixfleet.store.prefetch import prefetch_key, sign

SECRET = b"a secret of enough bytes"
KEY = keep_key(SECRET)
WISH = Keep(namespace=b"n" * 16, chain=(b"a" * 16, b"b" * 16), ttl_s=60.0, priority=7)
FIELDS = {"version": 1, "namespace": b"n" * 16, "chain": [b"a" * 16], "ttl_s": 1.0}


def test_what_is_opened_is_what_was_sent():
    body = encode_keep(WISH)

    assert open_keep(body, sign(body, KEY), KEY) == WISH


@pytest.mark.parametrize("key", [keep_key(b"another secret of a fleet"), prefetch_key(SECRET)])
def test_another_key_is_refused(key):
    """Also that of hints: what may be sent there must not pass here."""
    body = encode_keep(WISH)

    with pytest.raises(PeerRefused, match="cluster secret"):
        open_keep(body, sign(body, key), KEY)


@pytest.mark.parametrize(
    "values",
    [
        7,
        {},
        FIELDS | {"version": 99},
        FIELDS | {"chain": [b"short"]},
        FIELDS | {"chain": b"a" * 16},
        FIELDS | {"namespace": b""},
        FIELDS | {"ttl_s": -1.0},
        FIELDS | {"ttl_s": 1e9},
        FIELDS | {"priority": -1},
        FIELDS | {"priority": 101},
        FIELDS | {"priority": "high"},
        FIELDS | {"more": 1},
    ],
)
def test_signed_junk_is_a_protocol_error(values):
    body = msgpack.packb(values)

    with pytest.raises(ProtocolError, match="keep"):
        open_keep(body, sign(body, KEY), KEY)
