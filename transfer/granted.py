"""What a session sends is granted when it begins, and looked at again while it leaves."""

import asyncio
import contextlib
from collections.abc import Iterator, Sequence

from prefixfleet.store.errors import PullFailed
from prefixfleet.transfer import wire
from prefixfleet.transfer.link import Caller, Range, Service
from prefixfleet.transfer.stream import Stream
from prefixfleet.transfer.wire import Kind

REGRANT_S = 0.1
"""While bytes leave, the lease is looked at so often."""


def grants_all(service: Service, caller: Caller, ranges: Sequence[Range]) -> bool:
    """Whether the caller may read all of them now."""
    return all(service.grants(caller, part) for part in ranges)


@contextlib.contextmanager
def watching(
    stream: Stream, caller: Caller, ranges: Sequence[Range], service: Service
) -> Iterator[list[str]]:
    """Drop the connection when the ranges are not granted any more; the list says so then."""
    lost: list[str] = []
    loop = asyncio.get_running_loop()
    timer: asyncio.TimerHandle

    def look() -> None:
        nonlocal timer
        if grants_all(service, caller, ranges):
            timer = loop.call_later(REGRANT_S, look)
        else:
            lost.append(f"{caller.node}: its read lease ended before it took the bytes")
            stream.drop()

    timer = loop.call_later(REGRANT_S, look)
    try:
        yield lost
    finally:
        timer.cancel()


async def refuse(stream: Stream, id: int, reason: str, detail: str) -> None:
    """Say no to one question, if the caller still hears it."""
    body = wire.pack(wire.Refusal(reason, detail[:400]))
    with contextlib.suppress(PullFailed):
        await stream.send(wire.frame_header(Kind.REFUSED, body, id), body)


async def refuse_ungranted(stream: Stream, id: int) -> None:
    """Say that no read lease of the caller covers what it asks for."""
    await refuse(stream, id, "not_granted", "no read lease covers the ranges")
