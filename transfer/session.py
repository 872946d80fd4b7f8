"""The serving end of one peer connection: authenticate, then answer until it ends.

What the answers say is the `Service`'s affair; what may be read is asked of it before bytes leave
and again while they leave, so that a slow reader does not outlive its lease.
"""

import asyncio
import logging
from collections import Counter
from dataclasses import dataclass

from prefixfleet.store.errors import PeerLost, PeerRefused, ProtocolError, PullFailed
from prefixfleet.transfer import wire
from prefixfleet.transfer.crew import Crew
from prefixfleet.transfer.granted import grants_all, refuse, refuse_ungranted, watching
from prefixfleet.transfer.introduction import be_introduced
from prefixfleet.transfer.link import Caller, Range, Service
from prefixfleet.transfer.pushing import OpenSender, Pushes
from prefixfleet.transfer.stream import Stream
from prefixfleet.transfer.wire import Kind

log = logging.getLogger(__name__)

HANDSHAKE_S = 5.0
FROM_CALLERS = (Kind.ASK, Kind.READ, Kind.PING, Kind.REACH, Kind.PUSH)
SILENT_BEATS = 10
"""Heartbeats without a frame after which a caller counts as gone."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Served:
    """What every session of a listener shares.

    ``counters`` counts ended sessions by reason. ``attachment`` is handed to callers once they
    have proved themselves: what the link needs besides this connection. With ``bytes_apart``
    callers read the bytes in another way, and READ only asks whether they may. With ``open_sender``
    they may ask for bytes to be pushed to them in another way.
    """

    link: str
    node: str
    secret: bytes
    segment: memoryview
    service: Service
    heartbeat_s: float
    counters: Counter[str]
    attachment: bytes = b""
    crew: Crew | None = None
    bytes_apart: bool = False
    open_sender: OpenSender | None = None


async def serve_session(stream: Stream, caller_id: int, served: Served) -> None:
    """Serve one connection to its end, which is never an error of ours. Closes the stream."""
    reason = "closed"
    try:
        caller = await _authenticate(stream, caller_id, served)
        pushes = Pushes(
            stream,
            caller,
            service=served.service,
            counters=served.counters,
            open_sender=served.open_sender,
        )
        try:
            await _answer_all(stream, caller, served, pushes)
        finally:
            await pushes.close()
            served.service.disconnected(caller)
    except (PeerRefused, ProtocolError) as error:
        reason = error.reason
        log.warning("%s: dropped a connection: %s", served.link, error)
        await refuse(stream, 0, reason, str(error))
    except PullFailed as error:
        reason = error.reason
    except Exception:
        reason = "error"
        log.exception("%s: a question could not be answered", served.link)
    finally:
        served.counters[reason] += 1
        await stream.close()


async def _authenticate(stream: Stream, caller_id: int, served: Served) -> Caller:
    try:
        async with asyncio.timeout(HANDSHAKE_S):
            node = await be_introduced(
                stream, served.link, served.node, served.secret, served.attachment
            )
    except TimeoutError:
        raise PeerRefused(f"no handshake within {HANDSHAKE_S} s") from None
    return Caller(caller_id, node)


async def _answer_all(stream: Stream, caller: Caller, served: Served, pushes: Pushes) -> None:
    silent_s = SILENT_BEATS * served.heartbeat_s
    while True:
        try:
            async with asyncio.timeout(silent_s):
                header = wire.decode_header(await stream.receive(wire.HEADER.size))
                if header.kind not in FROM_CALLERS:
                    raise ProtocolError(f"{caller.node}: {header.kind.name} from a caller")
                body = bytes(await stream.receive(header.length))
        except TimeoutError:
            raise PeerLost(f"{caller.node}: silent for {silent_s} s") from None
        wire.check_body(header, body)
        if header.kind == Kind.PING:
            await stream.send(wire.frame_header(Kind.PONG))
        elif header.kind == Kind.ASK:
            answer = await served.service.answer(caller, body)
            frame = wire.frame_header(Kind.ANSWER, answer, header.id)
            await stream.send(frame, answer)
        elif header.kind == Kind.REACH:
            await pushes.reach(header.id, body)
        elif header.kind == Kind.PUSH:
            await pushes.begin(header.id, body)
        else:
            ranges = wire.decode_ranges(body, served.segment.nbytes)
            await _send_ranges(stream, header.id, caller, ranges, served)


async def _send_ranges(
    stream: Stream, id: int, caller: Caller, ranges: list[Range], served: Served
) -> None:
    if not grants_all(served.service, caller, ranges):
        served.counters["not_granted"] += 1
        await refuse_ungranted(stream, id)
        return
    if served.bytes_apart:
        await stream.send(wire.data_header(0, id))
        return
    header = wire.data_header(sum(part.length for part in ranges), id)
    views = [served.segment[part.offset : part.offset + part.length] for part in ranges]
    with watching(stream, caller, ranges, served.service) as lost:
        try:
            await stream.send(header, *views)
        except PeerLost:
            if lost:
                raise PeerLost(lost[0]) from None
            raise
