"""The handshake's proofs: bound to everything that was said, and to the role."""

import pytest

from prefixfleet.store.errors import PeerRefused
from prefixfleet.transfer.auth import Handshake, nonce
from prefixfleet.transfer.wire import Challenge, Hello

SECRET = b"secret of the fleet"
HELLO = Hello("a", "tcp", b"c" * 32)
CHALLENGE = Challenge("b", b"s" * 32)


def test_each_end_proves_itself_to_the_other():
    caller, listener = (Handshake(SECRET, HELLO, CHALLENGE) for _ in range(2))

    listener.check("caller", caller.proof("caller"))
    caller.check("listener", listener.proof("listener", b"attachment"), b"attachment")


OTHERS = {
    "secret": Handshake(b"another secret here", HELLO, CHALLENGE),
    "caller's name": Handshake(SECRET, Hello("x", "tcp", b"c" * 32), CHALLENGE),
    "link": Handshake(SECRET, Hello("a", "ucx", b"c" * 32), CHALLENGE),
    "caller's nonce": Handshake(SECRET, Hello("a", "tcp", b"d" * 32), CHALLENGE),
    "listener's name": Handshake(SECRET, HELLO, Challenge("x", b"s" * 32)),
    "listener's nonce": Handshake(SECRET, HELLO, Challenge("b", b"t" * 32)),
}


@pytest.mark.parametrize("other", OTHERS.values(), ids=OTHERS)
@pytest.mark.parametrize("role", ["caller", "listener"])
def test_a_proof_is_worth_nothing_where_anything_differs(other, role):
    with pytest.raises(PeerRefused):
        Handshake(SECRET, HELLO, CHALLENGE).check(role, other.proof(role))


def test_a_proof_of_one_role_is_none_of_the_other():
    handshake = Handshake(SECRET, HELLO, CHALLENGE)

    with pytest.raises(PeerRefused):
        handshake.check("listener", handshake.proof("caller"))


def test_another_attachment_is_refused():
    handshake = Handshake(SECRET, HELLO, CHALLENGE)

    with pytest.raises(PeerRefused):
        handshake.check("listener", handshake.proof("listener", b"here"), b"there")


def test_a_version_of_the_wire_has_its_own_proofs(monkeypatch):
    proof = Handshake(SECRET, HELLO, CHALLENGE).proof("caller")
    monkeypatch.setattr("prefixfleet.transfer.auth.WIRE_VERSION", 99)

    with pytest.raises(PeerRefused):
        Handshake(SECRET, HELLO, CHALLENGE).check("caller", proof)


def test_nonces_do_not_repeat():
    assert len({nonce() for _ in range(100)}) == 100
