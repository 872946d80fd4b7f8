"""`Link`: a way to reach a peer's segment. Every link passes `tests/contracts/test_link.py`.

A link does two things for the code above it: a small question with an answer (`Peer.ask`), and
reading ranges of the peer's registered segment into memory of ours (`Peer.read`). Whether the
bytes are pushed by the peer (sockets), fetched one-sided (UCX) or copied from a mapping (shared
memory) is the link's own affair. Links know nothing of blocks, hashes or leases.
"""

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, slots=True)
class Range:
    """``length`` bytes at ``offset`` of the segment that the peer registered."""

    offset: int
    length: int


Deadline = float
"""Absolute `time.monotonic` seconds of this process; never sent on the wire."""

Handler = Callable[["Caller", bytes], Awaitable[bytes]]
"""Answers one question of an authenticated peer. An exception it raises closes the connection."""

Grants = Callable[["Caller", Range], bool]
"""Whether the caller may read the range now (it holds a read lease on it)."""


@dataclass(frozen=True, slots=True)
class Caller:
    """An authenticated connection, as the serving side sees it. ``id`` is unique per listener."""

    id: int
    node: str


class Peer(Protocol):
    """One connection to one peer. Used by one pull at a time per call; calls may overlap.

    Every call raises `PeerLost`, `PeerRefused`, `ProtocolError` or, at the deadline,
    `DeadlineExceeded`; none waits longer. After any of these the peer must be closed.
    """

    async def ask(self, question: bytes, *, deadline: Deadline) -> bytes:
        """The peer's answer to ``question``; at most `MAX_MESSAGE_BYTES` either way."""
        ...

    async def read(
        self, ranges: Sequence[Range], targets: Sequence[memoryview], *, deadline: Deadline
    ) -> None:
        """Fill ``targets[i]`` with ``ranges[i]`` of the peer's segment.

        Lengths must agree pairwise. When this raises, the targets' content is undefined, and
        bytes may still arrive until `close` has returned: quarantine the targets until then.
        """
        ...

    async def close(self) -> None:
        """Drop the connection. After it returns nothing writes into any target any more."""
        ...

    @property
    def lanes(self) -> str:
        """What carries the bytes, e.g. "tcp" or "ucx:tcp/eth0"; shown in status."""
        ...


class Listener(Protocol):
    """The serving side of a link, for one segment."""

    @property
    def contact(self) -> str:
        """What a peer passes to `Link.connect`; it contains no secret."""
        ...

    async def close(self) -> None:
        """Stop serving and drop every connection; the segment may be unmapped afterwards."""
        ...


class Link(Protocol):
    """A kind of transport, holding the secret that both sides prove to know."""

    name: str

    async def listen(
        self, host: str, segment: memoryview, handler: Handler, grants: Grants
    ) -> Listener:
        """Serve ``segment`` on ``host``. Raises `ConfigError` if the address cannot be used."""
        ...

    async def connect(self, contact: str, *, deadline: Deadline) -> Peer:
        """Reach and mutually authenticate a listener. Raises the errors of `Peer`."""
        ...


MAX_MESSAGE_BYTES = 4 * 1024 * 1024
"""Bound on a question or an answer: 64 k block hashes and room to spare."""
