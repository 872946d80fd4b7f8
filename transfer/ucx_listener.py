"""The serving side of `UcxLink`: the registered segment, and messages for who cannot read it."""

import asyncio
import logging
from collections.abc import Callable, Sequence
from typing import Annotated, TypeVar

import msgspec

from prefixfleet.store.errors import PeerLost
from prefixfleet.transfer.acceptor import Acceptor
from prefixfleet.transfer.link import Range
from prefixfleet.transfer.ucx_inbox import Inbox
from prefixfleet.transfer.ucx_remote import Remote
from prefixfleet.transfer.ucx_thread import UcxThread

log = logging.getLogger(__name__)

Opened = TypeVar("Opened", Remote, Inbox)

UNMAP_S = 5.0
"""UCX lets go of what it serves within so long, or it is said that it does not."""
PIECE_BYTES = 16 * 1024 * 1024
"""Longer ranges are sent as several messages; both ends cut alike."""


class Memory(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A listener's attachment: how to reach its registered segment."""

    worker: Annotated[bytes, msgspec.Meta(min_length=1)]
    rkey: Annotated[bytes, msgspec.Meta(min_length=1)]
    address: Annotated[int, msgspec.Meta(ge=0)]
    length: Annotated[int, msgspec.Meta(ge=0)]


def register(thread: UcxThread, address: int, length: int) -> tuple[int, Memory]:
    """On the UCX thread: a handle for `Libucp.unmap`, and what callers are told."""
    context = thread.binding.context
    handle = thread.ucp.map(context, address, length)
    rkey = thread.ucp.pack_rkey(context, handle)
    return handle, Memory(thread.binding.address(), rkey, address, length)


async def opened(thread: UcxThread, call: Callable[[], Opened]) -> Opened:
    """What ``call`` opens on the UCX thread; where nobody waits for it any more, it is closed."""
    opening = thread.run(call)
    try:
        return await asyncio.shield(opening)
    except asyncio.CancelledError:
        opening.add_done_callback(lambda late: _drop(thread, late))
        raise


def _drop(thread: UcxThread, opening: "asyncio.Future[Opened]") -> None:
    if not opening.cancelled() and opening.exception() is None:
        thread.disconnect(opening.result())


class UcxSender:
    """Fulfils `Sender`: messages to the worker of one caller."""

    def __init__(self, thread: UcxThread, remote: Remote, memory: Memory) -> None:
        self.lanes = remote.transports
        self.segment_bytes = memory.length
        self._thread = thread
        self._remote = remote
        self._start = memory.address

    async def send(self, ranges: Sequence[Range], tag: int) -> None:
        """See `Sender`."""
        pieces = [(self._start + part.offset, part.length) for part in ranges]
        begun, ended = self._thread.begin(lambda done: self._remote.send(pieces, tag, done))
        await begun
        await ended

    async def close(self) -> None:
        """See `Sender`."""
        try:
            closing = self._thread.disconnect(self._remote)
        except PeerLost as error:
            log.error("an endpoint to a caller does not close: %s", error)
            return
        if not (await asyncio.wait({closing}, timeout=UNMAP_S))[0]:
            log.error("UCX did not close the endpoint to a caller within %s s", UNMAP_S)


class UcxListener:
    """Fulfils `Listener`. Owned by the event loop that opened it."""

    def __init__(self, acceptor: Acceptor, thread: UcxThread, handle: int) -> None:
        self.contact = acceptor.contact
        self._acceptor = acceptor
        self._thread = thread
        self._handle: int | None = handle

    async def close(self) -> None:
        """See `Listener`."""
        await self._acceptor.close()
        thread, handle = self._thread, self._handle
        if handle is not None:
            self._handle = None
            unmapping = thread.run(lambda: thread.ucp.unmap(thread.binding.context, handle))
            if not (await asyncio.wait({unmapping}, timeout=UNMAP_S))[0]:
                log.error("UCX did not let go of the pool within %s s", UNMAP_S)
            else:
                unmapping.result()
