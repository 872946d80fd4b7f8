"""`UcxLink`: one-sided reads by UCX, over whatever UCX finds: RDMA, CUDA or TCP; messages with
tags where one-sided reads are not possible.

Questions, authentication and heartbeats go over the same TCP channel as those of the TCP link,
since UCX itself reports a lost link late or never. Worker addresses and memory keys are told only
to who has proved itself. UCX itself has no authentication: on transports that emulate one-sided
reads (TCP), whoever reaches UCX's own port reaches the process; keep it on the cluster's network
with ``UCX_NET_DEVICES``.
"""

import asyncio
import logging
from collections import Counter
from typing import Literal

from prefixfleet.store.errors import ConfigError, PeerLost
from prefixfleet.transfer import wire
from prefixfleet.transfer.acceptor import Acceptor
from prefixfleet.transfer.channel import Channel
from prefixfleet.transfer.choice import has_rdma
from prefixfleet.transfer.deadline import until
from prefixfleet.transfer.link import Deadline, Service
from prefixfleet.transfer.session import Served
from prefixfleet.transfer.ucx_get import address_of
from prefixfleet.transfer.ucx_listener import Memory, UcxListener, UcxSender, opened, register
from prefixfleet.transfer.ucx_peer import GetPeer, TagPeer, by_gets, by_tags
from prefixfleet.transfer.ucx_remote import KeyUnusable
from prefixfleet.transfer.ucx_thread import UcxThread

log = logging.getLogger(__name__)

START_S = 30.0

_Side = Literal["serving", "reading"]


class UcxLink:
    """Fulfils `Link`. Owned by one event loop; UCX itself has two threads, started at first use:
    one serves, one reads. Of two workers that each connect to the other UCX makes one connection
    of both endpoints, and closing one of them would break what the other reads.

    ``binding`` is "ucxx" or "ucp", by default the first that is here. Bytes are read one-sided;
    they come as messages with tags where UCX cannot use the source's memory key, or with ``tags``.
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
        tags: bool = False,
    ) -> None:
        self._node = node
        self._secret = secret
        self._port = port
        self._heartbeat_s = heartbeat_s
        self._binding = binding
        self._tags = tags
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
        handle, memory = await thread.run(lambda: register(thread, address, segment.nbytes))

        async def open_sender(worker: bytes) -> UcxSender:
            return UcxSender(thread, await opened(thread, lambda: thread.connect(worker)), memory)

        served = Served(
            link=self.name,
            node=self._node,
            secret=self._secret,
            segment=segment[:0],  # nothing of it travels over the channel
            service=service,
            heartbeat_s=self._heartbeat_s,
            counters=self.counters,
            attachment=wire.pack(memory),
            open_sender=open_sender,
        )
        acceptor = await Acceptor.open(host, self._port, served)
        return UcxListener(acceptor, thread, handle)

    async def connect(self, contact: str, *, deadline: Deadline) -> GetPeer | TagPeer:
        """See `Link`."""
        try:
            async with until(deadline, "start of UCX"):
                thread = await self._started("reading")
        except (ConfigError, OSError) as error:  # it serves already: something has run out since
            raise PeerLost(f"UCX does not read: {error}") from error
        channel = await Channel.open(
            contact,
            link=self.name,
            node=self._node,
            secret=self._secret,
            heartbeat_s=self._heartbeat_s,
            deadline=deadline,
        )
        try:
            memory: Memory = wire.unpack(channel.attachment, Memory)
            async with until(deadline, f"UCX connection to {contact}"):
                return await self._connect(channel, thread, memory, deadline)
        except BaseException:
            await channel.close()
            raise

    async def close(self) -> None:
        """See `Link`: ends the threads."""
        starts, self._threads = list(self._threads.values()), {}
        threads = [start.result() for start in starts if start.done() and not start.exception()]
        await asyncio.gather(*(thread.stop() for thread in threads))

    async def _connect(
        self, channel: Channel, thread: UcxThread, memory: Memory, deadline: Deadline
    ) -> GetPeer | TagPeer:
        """One-sided if that is possible."""
        if self._tags:
            return await by_tags(channel, thread, memory, deadline=deadline, why="forced")
        try:
            return await by_gets(channel, thread, memory)
        except KeyUnusable as error:
            if not self.counters["no_memory_key"]:
                log.warning("UCX: %s sends messages: %s", channel.node, error)
            self.counters["no_memory_key"] += 1
        why = "its memory key is of no use here"
        return await by_tags(channel, thread, memory, deadline=deadline, why=why)

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
