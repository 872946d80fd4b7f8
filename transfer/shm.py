"""`ShmLink`: peers of one host map each other's pool, and copy out of it what they may read.

Questions, authentication, heartbeats and leases go over the same TCP channel as those of the
other links. The name of this host's boot and shared memory is part of the link's own name, so
that a peer of another host is refused before it is told where the pool lies. Before bytes are
copied the source says that a lease covers them, and after it once more; what passes both is
still proved by its header and checksum, as over every link.
"""

import asyncio
import threading
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor

import numpy as np

from prefixfleet.store.errors import PeerLost, ProtocolError
from prefixfleet.transfer import wire
from prefixfleet.transfer.acceptor import Acceptor
from prefixfleet.transfer.asking import AskingPeer
from prefixfleet.transfer.channel import Channel
from prefixfleet.transfer.extents import cut
from prefixfleet.transfer.link import (
    Arrived,
    Deadline,
    Range,
    Service,
    after,
    check_lengths,
    unheard,
)
from prefixfleet.transfer.session import Served
from prefixfleet.transfer.shared_file import SharedFile, file_of, map_file, place
from prefixfleet.transfer.ucx_get import address_of
from prefixfleet.transfer.wire import Kind

COPIERS = 4
"""Threads of a link that copy; memory has no more to give to more of them."""
COPY_BYTES = 16 * 1024 * 1024
"""One question and one copy are about so much."""
STEP_BYTES = 512 * 1024
"""What a copy has brought is told after so much, while it is in the cache; one that nobody waits
for any more ends then."""


class _Mapped:
    """A peer's file, mapped once for all connections to it. Owned by the link."""

    def __init__(self, file: SharedFile) -> None:
        self.view = map_file(file)
        self.users = 0


class ShmPeer(AskingPeer):
    """Fulfils `Peer`. Owned by the event loop that connected it."""

    lanes = "shm"

    def __init__(
        self, channel: Channel, link: "ShmLink", file: SharedFile, segment: memoryview
    ) -> None:
        super().__init__(channel)
        self._link = link
        self._file = file
        self._segment = segment
        self._stop = threading.Event()
        self._copies: set[Future[None]] = set()

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
        for part in ranges:
            if part.offset + part.length > self._file.length:
                raise ProtocolError(f"read: {part} is not inside {self._file.length} bytes")
        portions = list(cut(ranges, targets, COPY_BYTES))
        before = 0
        for parts, views in portions:
            await self._channel.tell(Kind.READ, wire.encode_ranges(parts), deadline=deadline)
            heard = after(before, arrived)
            copy = self._link.copiers.submit(_copy, self._segment, parts, views, self._stop, heard)
            before += sum(part.length for part in parts)
            self._copies.add(copy)
            copy.add_done_callback(self._copies.discard)
            await self._channel.wait(asyncio.wrap_future(copy), deadline=deadline, what="read")
        for parts, _ in portions:
            await self._channel.tell(Kind.READ, wire.encode_ranges(parts), deadline=deadline)

    async def close(self) -> None:
        """See `Peer`."""
        self._stop.set()
        ending = [asyncio.wrap_future(copy) for copy in list(self._copies)]
        await asyncio.shield(asyncio.gather(*ending, return_exceptions=True))
        await self._channel.close()
        if self._segment:
            self._segment = memoryview(b"")
            self._link.unmap(self._file)


class ShmLink:
    """Fulfils `Link`. Owned by one event loop. ``port`` 0 takes a free one.

    Raises `ConfigError` where the host has no shared memory.
    """

    name = "shm"
    rdma = False

    def __init__(
        self, *, node: str, secret: bytes, port: int = 0, heartbeat_s: float = 1.0
    ) -> None:
        self.scheme = f"{self.name}.{place()}"  # of contacts, and of the handshake
        self.copiers = ThreadPoolExecutor(COPIERS, thread_name_prefix="prefixfleet-shm")
        self.counters: Counter[str] = Counter()
        self._node = node
        self._secret = secret
        self._port = port
        self._heartbeat_s = heartbeat_s
        self._mapped: dict[SharedFile, _Mapped] = {}

    def reaches(self, contact: str) -> bool:
        """See `Link`."""
        return contact.startswith(f"{self.scheme}://")

    async def listen(self, host: str, segment: memoryview, service: Service) -> Acceptor:
        """See `Link`; the segment must be a mapped file that is private to this user."""
        served = Served(
            link=self.scheme,
            node=self._node,
            secret=self._secret,
            segment=segment,
            service=service,
            heartbeat_s=self._heartbeat_s,
            counters=self.counters,
            attachment=wire.pack(file_of(address_of(segment), segment.nbytes)),
            bytes_apart=True,
        )
        return await Acceptor.open(host, self._port, served)

    async def connect(self, contact: str, *, deadline: Deadline) -> ShmPeer:
        """See `Link`."""
        channel = await Channel.open(
            contact,
            link=self.scheme,
            node=self._node,
            secret=self._secret,
            heartbeat_s=self._heartbeat_s,
            deadline=deadline,
        )
        try:
            file: SharedFile = wire.unpack(channel.attachment, SharedFile)
            return ShmPeer(channel, self, file, self._map(file))
        except BaseException:
            await channel.close()
            raise

    async def close(self) -> None:
        """See `Link`."""
        self.copiers.shutdown(wait=False)

    def unmap(self, file: SharedFile) -> None:
        """One connection to the file's owner is closed."""
        self._mapped[file].users -= 1
        if not self._mapped[file].users:
            del self._mapped[file]

    def _map(self, file: SharedFile) -> memoryview:
        mapped = self._mapped.get(file) or self._mapped.setdefault(file, _Mapped(file))
        mapped.users += 1
        return mapped.view


def _copy(
    segment: memoryview,
    parts: Sequence[Range],
    targets: Sequence[memoryview],
    stop: threading.Event,
    arrived: Arrived,
) -> None:
    """In a thread; numpy copies without the interpreter's lock. Raises `PeerLost` if stopped."""
    source = np.frombuffer(segment, np.uint8)
    have = 0
    for part, target in zip(parts, targets, strict=True):
        ours = np.frombuffer(target, np.uint8)
        for start in range(0, part.length, STEP_BYTES):
            if stop.is_set():
                raise PeerLost("the connection was closed on this side")
            end = min(start + STEP_BYTES, part.length)
            np.copyto(ours[start:end], source[part.offset + start : part.offset + end])
            have += end - start
            arrived(have)
