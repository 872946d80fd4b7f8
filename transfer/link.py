"""`Link`: a way to reach a peer's segment. Every link passes `tests/contracts/test_link.py`.

A link does two things for the code above it: a small question with an answer (`Peer.ask`), and
reading ranges of the peer's registered segment into memory of ours (`Peer.read`). Whether the
bytes are pushed by the peer (sockets), fetched one-sided (UCX) or copied from a mapping (shared
memory) is the link's own affair. Links know nothing of blocks, hashes or leases.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, slots=True)
class Range:
    """``length`` bytes at ``offset`` of the segment that the peer registered."""

    offset: int
    length: int


Deadline = float
"""Absolute `time.monotonic` seconds of this process; never sent on the wire."""


Arrived = Callable[[int], None]
"""Told how many leading bytes of a read's targets, one after another, are in place for good.

Called in ascending order, by one thread at a time, or not at all; it must not raise.
"""


def unheard(count: int) -> None:
    """For who does not care what has arrived."""


def after(before: int, arrived: Arrived) -> Arrived:
    """``arrived`` for a part of the targets that ``before`` bytes come before."""
    return lambda count: arrived(before + count)


@dataclass(frozen=True, slots=True)
class Caller:
    """An authenticated connection, as the serving side sees it. ``id`` is unique per process."""

    id: int
    node: str


class Service(Protocol):
    """What a listener serves. Called on the listener's event loop only."""

    async def answer(self, caller: Caller, question: bytes) -> bytes:
        """The answer to one question. An exception it raises closes the connection."""
        ...

    def grants(self, caller: Caller, part: Range) -> bool:
        """Whether the caller may read the range now (it holds a read lease on it)."""
        ...

    def disconnected(self, caller: Caller) -> None:
        """The connection ended, for whatever reason; called once for each caller."""
        ...


class Peer(Protocol):
    """One connection to one peer. Calls may overlap.

    Every call raises `PeerLost`, `PeerRefused`, `ProtocolError` or, at the deadline,
    `DeadlineExceeded`; none waits longer. After any of these, or after a call was cancelled, the
    peer must be closed.
    """

    @property
    def node(self) -> str:
        """The name that the peer proved to have."""
        ...

    @property
    def lanes(self) -> str:
        """What carries the bytes, e.g. "tcp" or "ucx:tcp/eth0"; shown in status."""
        ...

    @property
    def broken(self) -> bool:
        """Whether the connection is known to be of no more use."""
        ...

    async def ask(self, question: bytes, *, deadline: Deadline) -> bytes:
        """The peer's answer to ``question``; at most `MAX_MESSAGE_BYTES` either way."""
        ...

    async def read(
        self,
        ranges: Sequence[Range],
        targets: Sequence[memoryview],
        *,
        deadline: Deadline,
        arrived: Arrived = unheard,
    ) -> None:
        """Fill ``targets[i]`` with ``ranges[i]`` of the peer's segment.

        Targets are writable, contiguous and of format "B"; lengths agree pairwise (`ValueError`
        if not). ``arrived`` hears of them, where the link can tell. When this raises, the
        targets' content is undefined, and bytes may still arrive until `close` has returned:
        quarantine the targets until then.
        """
        ...

    async def close(self) -> None:
        """Drop the connection. After it returns nothing writes into any target any more.

        A transport that stands still may never be sure of that: bound the wait (`Closing`).
        """
        ...


class Listener(Protocol):
    """The serving side of a link, for one segment."""

    @property
    def contact(self) -> str:
        """What a peer passes to `Link.connect`; it contains no secret."""
        ...

    async def close(self) -> None:
        """Stop serving and drop every connection; the segment may be unmapped afterwards.

        Repeated calls do nothing.
        """
        ...


class Link(Protocol):
    """A kind of transport, holding the secret that both sides prove to know."""

    @property
    def name(self) -> str:
        """Key of its contacts: "tcp", "ucx", "shm" or "inproc"."""
        ...

    @property
    def rdma(self) -> bool:
        """Whether it moves bytes without the CPU; may be False until the link was used."""
        ...

    @property
    def counters(self) -> Counter[str]:
        """Connections to listeners of this link that ended, and refusals, by reason."""
        ...

    def reaches(self, contact: str) -> bool:
        """False if this host can certainly not use the contact; costs no connection."""
        ...

    async def listen(self, host: str, segment: memoryview, service: Service) -> Listener:
        """Serve ``segment`` on ``host``. Raises `ConfigError` if the address cannot be used."""
        ...

    async def connect(self, contact: str, *, deadline: Deadline) -> Peer:
        """Reach and mutually authenticate a listener. Raises the errors of `Peer`."""
        ...

    async def close(self) -> None:
        """Give back what the link itself holds (a thread), after its listeners and peers."""
        ...


MAX_MESSAGE_BYTES = 4 * 1024 * 1024
"""Bound on a question or an answer: 64 k block hashes and room to spare."""


def check_lengths(ranges: Sequence[Range], targets: Sequence[memoryview]) -> None:
    """Raises `ValueError` unless each target is as long as its range and can be written to."""
    if len(ranges) != len(targets):
        raise ValueError(f"read: got {len(ranges)} ranges and {len(targets)} targets")
    for part, target in zip(ranges, targets, strict=True):
        if part.length != target.nbytes or target.readonly:
            raise ValueError(
                f"read: {part} into {target.nbytes} {'read-only ' * target.readonly}bytes"
            )
