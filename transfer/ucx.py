"""`UcxLink`: one-sided reads by UCX, over whatever UCX finds: RDMA, CUDA or TCP.

Questions, authentication and heartbeats go over the same TCP channel as those of the TCP link,
since UCX itself reports a lost link late or never. The peer's worker address and memory key are
told only to a caller that has proved itself. UCX itself has no authentication: on transports
that emulate one-sided reads (TCP), whoever reaches UCX's own port reaches the process; keep it
on the cluster's network with ``UCX_NET_DEVICES``.
"""

import asyncio
import logging
from collections import Counter
from collections.abc import Sequence
from typing import Annotated, Literal

import msgspec

from prefixfleet.store.errors import ConfigError, ProtocolError
from prefixfleet.transfer import wire
from prefixfleet.transfer.acceptor import Acceptor
from prefixfleet.transfer.asking import AskingPeer
from prefixfleet.transfer.channel import Channel
from prefixfleet.transfer.choice import has_rdma
from prefixfleet.transfer.deadline import until
from prefixfleet.transfer.link import Arrived, Deadline, Range, Service, check_lengths, unheard
from prefixfleet.transfer.session import Served
from prefixfleet.transfer.ucx_get import address_of
from prefixfleet.transfer.ucx_remote import Remote
from prefixfleet.transfer.ucx_thread import UcxThread

log = logging.getLogger(__name__)

OPERATION_BYTES = 16 * 1024 * 1024
"""Longer ranges are read by several operations."""

START_S = 30.0
UNMAP_S = 5.0

_Side = Literal["serving", "reading"]


class _Memory(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A listener's attachment: how to reach its registered segment."""

    worker: Annotated[bytes, msgspec.Meta(min_length=1)]
    rkey: Annotated[bytes, msgspec.Meta(min_length=1)]
    address: Annotated[int, msgspec.Meta(ge=0)]
    length: Annotated[int, msgspec.Meta(ge=0)]


class UcxPeer(AskingPeer):
    """Fulfils `Peer`. Owned by the event loop that connected it."""

    def __init__(
        self, channel: Channel, thread: UcxThread, remote: Remote, memory: _Memory
    ) -> None:
        self.lanes = f"ucx:{remote.transports}"
        super().__init__(channel)
        self._thread = thread
        self._remote = remote
        self._memory = memory

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
        operations: list[tuple[int, int, int]] = []
        for part, target in zip(ranges, targets, strict=True):
            if part.offset + part.length > self._memory.length:
                raise ProtocolError(f"read: {part} is not inside {self._memory.length} bytes")
            start = address_of(target) if part.length else 0
            for done in range(0, part.length, OPERATION_BYTES):
                length = min(OPERATION_BYTES, part.length - done)
                remote = self._memory.address + part.offset + done
                operations.append((remote, start + done, length))
        reading = self._thread.read(self._remote, operations)
        await self._channel.wait(reading, deadline=deadline, what="read")

    async def close(self) -> None:
        """See `Peer`."""
        try:
            await asyncio.shield(self._thread.disconnect(self._remote))
        finally:
            await self._channel.close()


class UcxListener:
    """Fulfils `Listener`. Owned by the event loop that opened it."""

    def __init__(self, acceptor: Acceptor, thread: UcxThread, memory: int) -> None:
        self.contact = acceptor.contact
        self._acceptor = acceptor
        self._thread = thread
        self._memory: int | None = memory

    async def close(self) -> None:
        """See `Listener`."""
        await self._acceptor.close()
        thread, memory = self._thread, self._memory
        if memory is not None:
            self._memory = None
            unmapping = thread.run(lambda: thread.ucp.unmap(thread.binding.context, memory))
            if not (await asyncio.wait({unmapping}, timeout=UNMAP_S))[0]:
                log.error("UCX did not let go of the pool within %s s", UNMAP_S)
            else:
                unmapping.result()


class UcxLink:
    """Fulfils `Link`. Owned by one event loop; UCX itself has two threads, started at first use:
    one serves, one reads. Of two workers that each connect to the other UCX makes one connection
    of both endpoints, and closing one of them would break what the other reads.

    ``binding`` is "ucxx" or "ucp", by default the first that is here.
    """

    name = "ucx"

    def __init__(
        self,
        *,
        node: str,
        secret: bytes,
        port: int = 0,
        heartbeat_s: float = 1.0,
        binding: str | None = None,
    ) -> None:
        self._node = node
        self._secret = secret
        self._port = port
        self._heartbeat_s = heartbeat_s
        self._binding = binding
        self._threads: dict[_Side, asyncio.Task[UcxThread]] = {}
        self._rdma = False
        self.counters: Counter[str] = Counter()

    @property
    def rdma(self) -> bool:
        """Whether UCX found a device that moves bytes without the CPU; False before it runs."""
        return self._rdma

    def reaches(self, contact: str) -> bool:
        """See `Link`."""
        return True

    async def listen(self, host: str, segment: memoryview, service: Service) -> UcxListener:
        """See `Link`."""
        try:
            async with asyncio.timeout(START_S):
                thread = await self._started("serving")
        except TimeoutError:
            raise ConfigError(
                f"UCX link: UCX did not start within {START_S} s; check UCX_NET_DEVICES, or set "
                "PREFIXFLEET_NODE_LINK=tcp"
            ) from None
        address = address_of(segment)
        memory, attachment = await thread.run(lambda: _register(thread, address, segment.nbytes))
        served = Served(
            link=self.name,
            node=self._node,
            secret=self._secret,
            segment=segment[:0],  # nothing of it travels over the channel
            service=service,
            heartbeat_s=self._heartbeat_s,
            counters=self.counters,
            attachment=wire.pack(attachment),
        )
        acceptor = await Acceptor.open(host, self._port, served)
        return UcxListener(acceptor, thread, memory)

    async def connect(self, contact: str, *, deadline: Deadline) -> UcxPeer:
        """See `Link`."""
        async with until(deadline, "start of UCX"):
            thread = await self._started("reading")
        channel = await Channel.open(
            contact,
            link=self.name,
            node=self._node,
            secret=self._secret,
            heartbeat_s=self._heartbeat_s,
            deadline=deadline,
        )
        connecting: asyncio.Future[Remote] | None = None
        try:
            memory: _Memory = wire.unpack(channel.attachment, _Memory)
            connecting = thread.run(lambda: thread.connect(memory.worker, memory.rkey))
            async with until(deadline, f"UCX connection to {contact}"):
                remote = await asyncio.shield(connecting)
        except BaseException:
            if connecting is not None:  # it may still succeed, and nobody would close it
                connecting.add_done_callback(lambda late: _drop(thread, late))
            await channel.close()
            raise
        return UcxPeer(channel, thread, remote, memory)

    async def close(self) -> None:
        """See `Link`: ends the threads."""
        starts, self._threads = list(self._threads.values()), {}
        threads = [start.result() for start in starts if start.done() and not start.exception()]
        await asyncio.gather(*(thread.stop() for thread in threads))

    async def _started(self, side: _Side) -> UcxThread:
        start = self._threads.get(side)
        if start is None or (start.done() and start.exception()):
            start = self._threads[side] = asyncio.create_task(self._start(side))
        return await asyncio.shield(start)  # it outlasts who gives up waiting: there is only one

    async def _start(self, side: _Side) -> UcxThread:
        thread = UcxThread(self._binding)
        await thread.start()
        devices = sorted(await thread.run(thread.binding.devices))
        self._rdma = has_rdma("ucx:" + ",".join(devices))
        log.info("UCX through %s, %s: %s", thread.binding.name, side, devices)
        return thread


def _register(thread: UcxThread, address: int, length: int) -> tuple[int, _Memory]:
    context = thread.binding.context
    memory = thread.ucp.map(context, address, length)
    rkey = thread.ucp.pack_rkey(context, memory)
    return memory, _Memory(thread.binding.address(), rkey, address, length)


def _drop(thread: UcxThread, connecting: "asyncio.Future[Remote]") -> None:
    if not connecting.cancelled() and connecting.exception() is None:
        thread.disconnect(connecting.result())
