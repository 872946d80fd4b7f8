"""`InprocLink`: peers in one process, with faults on demand. Tests and simulations use it.

Passes the contract of every link. What goes wrong is a `Faults` record of the network, and the
same seed gives the same faults.
"""

import asyncio
import itertools
import random
import secrets
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from prefixfleet.store.errors import PeerLost, PeerRefused, ProtocolError
from prefixfleet.transfer.auth import Handshake, nonce
from prefixfleet.transfer.deadline import until
from prefixfleet.transfer.link import (
    MAX_MESSAGE_BYTES,
    Arrived,
    Caller,
    Deadline,
    Range,
    Service,
    after,
    check_lengths,
    unheard,
)
from prefixfleet.transfer.wire import Challenge, Hello

STEP_BYTES = 256 * 1024
"""A read is copied in steps of so many bytes; faults happen between two steps."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Faults:
    """What is wrong with a network. Shares are of 1; the defaults are a perfect network."""

    delay_s: float = 0.0  # before each answer and each read
    bytes_per_s: float = 0.0  # of each read; 0: as fast as memory
    drop_share: float = 0.0  # of answers and reads that never come
    corrupt_share: float = 0.0  # of steps in which one byte is changed
    cut_after_bytes: int | None = None  # of one connection; then it is lost
    frozen: bool = False  # nothing moves, nothing is refused


class InprocNetwork:
    """What the links of one process have in common. Owned by one event loop."""

    def __init__(self, seed: int = 0) -> None:
        self.faults = Faults()
        self.random = random.Random(seed)
        self.listeners: dict[str, InprocListener] = {}


class InprocListener:
    """Fulfils `Listener`."""

    def __init__(
        self,
        network: InprocNetwork,
        contact: str,
        link: "InprocLink",
        segment: memoryview,
        service: Service,
    ) -> None:
        self.contact = contact
        self.link = link
        self.segment = segment
        self.service = service
        self.peers: set[InprocPeer] = set()
        self._network = network
        network.listeners[contact] = self

    async def close(self) -> None:
        """See `Listener`."""
        self._network.listeners.pop(self.contact, None)
        for peer in list(self.peers):
            await peer.close()


class InprocPeer:
    """Fulfils `Peer`."""

    lanes = "inproc"

    def __init__(self, network: InprocNetwork, listener: InprocListener, caller: Caller) -> None:
        self.node = listener.link.node
        self.broken = False
        self._network = network
        self._listener = listener
        self._service = listener.service
        self._caller = caller
        self._closed = asyncio.Event()
        self._moved = 0
        listener.peers.add(self)

    async def ask(self, question: bytes, *, deadline: Deadline) -> bytes:
        """See `Peer`."""
        async with until(deadline, f"question to {self.node}"):
            try:
                _check_size(question)
                await self._suffer()
                answer = await self._answer(question)
                _check_size(answer)
                return answer
            except BaseException:
                self.broken = True
                raise

    async def read(
        self,
        ranges: Sequence[Range],
        targets: Sequence[memoryview],
        *,
        deadline: Deadline,
        arrived: Arrived = unheard,
    ) -> None:
        """See `Peer`."""
        check_lengths(ranges, targets)
        async with until(deadline, f"read from {self.node}"):
            try:
                await self._suffer()
                have = 0
                for part, target in zip(ranges, targets, strict=True):
                    await self._copy(part, target, after(have, arrived))
                    have += part.length
            except BaseException:
                self.broken = True
                raise

    async def close(self) -> None:
        """See `Peer`."""
        self.broken = True
        self._closed.set()
        if self in self._listener.peers:
            self._listener.peers.remove(self)
            self._service.disconnected(self._caller)

    async def _answer(self, question: bytes) -> bytes:
        try:
            return await self._service.answer(self._caller, question)
        except Exception as error:
            self._listener.link.counters["error"] += 1
            await self.close()
            raise PeerLost(f"{self.node}: the peer closed the connection") from error

    async def _copy(self, part: Range, target: memoryview, arrived: Arrived) -> None:
        if part.offset + part.length > self._listener.segment.nbytes:
            raise ProtocolError(f"read: {part} is not inside the peer's segment")
        for start in range(0, part.length, STEP_BYTES):
            length = min(STEP_BYTES, part.length - start)
            await self._pace(length)
            if not self._service.grants(self._caller, Range(part.offset + start, length)):
                self._listener.link.counters["not_granted"] += 1
                raise PeerRefused(f"{self.node} refused: no read lease covers the range")
            source = self._listener.segment[part.offset + start :][:length]
            target[start : start + length] = source
            if self._network.random.random() < self._network.faults.corrupt_share:
                target[start + self._network.random.randrange(length)] ^= 0xFF
            arrived(start + length)

    async def _pace(self, length: int) -> None:
        faults = self._network.faults
        if faults.frozen:
            await self._until_closed()
        await asyncio.sleep(length / faults.bytes_per_s if faults.bytes_per_s else 0)
        self._moved += length
        if faults.cut_after_bytes is not None and self._moved > faults.cut_after_bytes:
            await self.close()
        self._check_open()

    async def _suffer(self) -> None:
        faults = self._network.faults
        self._check_open()
        await asyncio.sleep(faults.delay_s)
        if faults.frozen or self._network.random.random() < faults.drop_share:
            await self._until_closed()
        self._check_open()

    async def _until_closed(self) -> None:
        await self._closed.wait()
        self._check_open()

    def _check_open(self) -> None:
        if self._closed.is_set():
            raise PeerLost(f"{self.node}: the connection is closed")


class InprocLink:
    """Fulfils `Link`. Owned by the network's event loop."""

    name = "inproc"
    rdma = False

    def __init__(self, network: InprocNetwork, *, node: str, secret: bytes) -> None:
        self.node = node
        self.secret = secret
        self.counters: Counter[str] = Counter()
        self._network = network
        self._numbers = itertools.count(1)

    def reaches(self, contact: str) -> bool:
        """See `Link`."""
        return True

    async def listen(self, host: str, segment: memoryview, service: Service) -> InprocListener:
        """See `Link`; every host name will do."""
        contact = f"inproc://{self.node}/{host}/{next(self._numbers)}"
        return InprocListener(self._network, contact, self, segment, service)

    async def connect(self, contact: str, *, deadline: Deadline) -> InprocPeer:
        """See `Link`."""
        async with until(deadline, f"connect to {contact}"):
            await asyncio.sleep(self._network.faults.delay_s)
            if self._network.faults.frozen:
                await asyncio.Event().wait()
            listener = self._network.listeners.get(contact)
            if listener is None:
                raise PeerLost(f"{contact}: connection refused")
            self._authenticate(listener.link)
            caller = Caller(secrets.randbits(63), self.node)
            return InprocPeer(self._network, listener, caller)

    async def close(self) -> None:
        """See `Link`."""

    def _authenticate(self, other: "InprocLink") -> None:
        hello, challenge = Hello(self.node, self.name, nonce()), Challenge(other.node, nonce())
        proof = Handshake(self.secret, hello, challenge).proof("caller")
        Handshake(other.secret, hello, challenge).check("caller", proof)


def _check_size(message: bytes) -> None:
    if len(message) > MAX_MESSAGE_BYTES:
        raise ProtocolError(f"got {len(message)} bytes, expected at most {MAX_MESSAGE_BYTES}")
