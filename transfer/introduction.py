"""The first frames of a connection, at both ends: each side proves that it knows the secret before
anything else is said. Bounding the time is the matter of the callers.
"""

from prefixfleet.store.errors import PeerRefused, ProtocolError
from prefixfleet.transfer import wire
from prefixfleet.transfer.auth import Handshake, nonce
from prefixfleet.transfer.stream import Stream
from prefixfleet.transfer.wire import Kind


async def introduce(stream: Stream, link: str, node: str, secret: bytes) -> tuple[str, bytes]:
    """As the caller. Returns the listener's name and its attachment.

    Raises `PeerRefused` for another secret or a refusal, `ProtocolError` for anything else.
    """
    hello = wire.Hello(node, link, nonce())
    await _say(stream, Kind.HELLO, wire.pack(hello))
    challenge: wire.Challenge = wire.unpack(
        await _heard(stream, Kind.CHALLENGE, or_refusal=True), wire.Challenge
    )
    handshake = Handshake(secret, hello, challenge)
    await _say(stream, Kind.PROOF, wire.pack(wire.Proof(handshake.proof("caller"))))
    welcome: wire.Welcome = wire.unpack(
        await _heard(stream, Kind.WELCOME, or_refusal=True), wire.Welcome
    )
    handshake.check("listener", welcome.proof, welcome.attachment)
    return challenge.node, welcome.attachment


async def be_introduced(
    stream: Stream, link: str, node: str, secret: bytes, attachment: bytes
) -> str:
    """As the listener, who hands ``attachment`` over to a caller that is proved. Returns the
    caller's name.

    Raises `PeerRefused` for another secret or link, `ProtocolError` for what is no introduction.
    """
    hello: wire.Hello = wire.unpack(await _heard(stream, Kind.HELLO), wire.Hello)
    if hello.link != link:
        raise PeerRefused(f"this is the {link} link, not {hello.link!r}")
    challenge = wire.Challenge(node, nonce())
    await _say(stream, Kind.CHALLENGE, wire.pack(challenge))
    handshake = Handshake(secret, hello, challenge)
    proof: wire.Proof = wire.unpack(await _heard(stream, Kind.PROOF), wire.Proof)
    handshake.check("caller", proof.proof)
    proven = handshake.proof("listener", attachment)
    await _say(stream, Kind.WELCOME, wire.pack(wire.Welcome(proven, attachment)))
    return hello.node


async def receive_body(stream: Stream, header: wire.Header) -> bytearray:
    """What follows a frame's header. Raises `ProtocolError` if it was changed on the way."""
    body = await stream.receive(header.length)
    wire.check_body(header, body)
    return body


def refused(node: str, body: bytes) -> PeerRefused:
    """What ``node`` said in a frame of kind REFUSED. Raises `ProtocolError`."""
    refusal: wire.Refusal = wire.unpack(body, wire.Refusal)
    return PeerRefused(f"{node} refused ({refusal.reason}): {refusal.detail}")


async def _say(stream: Stream, kind: Kind, body: bytes) -> None:
    await stream.send(wire.frame_header(kind, body), body)


async def _heard(stream: Stream, kind: Kind, *, or_refusal: bool = False) -> bytearray:
    """The body of the next frame, which must be of this kind."""
    header = wire.decode_header(await stream.receive(wire.HEADER.size))
    if header.kind != kind and not (or_refusal and header.kind == Kind.REFUSED):
        raise ProtocolError(f"handshake: got {header.kind.name}, expected {kind.name}")
    body = await receive_body(stream, header)
    if header.kind == Kind.REFUSED:
        raise refused("peer", bytes(body))
    return body
