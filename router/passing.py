"""An upstream answer to the client, byte for byte: nothing is parsed, cut or joined.

A short whole answer is held until it is complete, so that a worker that breaks it off can still
be replaced; a stream is passed on as its bytes arrive, and what breaks then is told to the client.
"""

import logging
from collections.abc import Mapping
from dataclasses import dataclass

from aiohttp import web

from prefixfleet.router.errors import UpstreamFailed, error_body
from prefixfleet.router.headers import to_client
from prefixfleet.router.upstream import Answer, StreamBroken, WorkerLost

MAX_HELD_BYTES = 1 << 20

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Passed:
    """``whole`` is the body if it was held, else empty; ``events`` counts those of a stream that
    came after its first bytes."""

    response: web.StreamResponse
    whole: bytes = b""
    events: int = 0


async def pass_on(answer: Answer, request: web.Request, ours: Mapping[str, str]) -> Passed:
    """The finished response.

    Raises:
        WorkerLost: the worker broke off an answer of which the client has nothing yet.
    """
    headers = to_client(answer.headers, ours)
    length = answer.content_length
    if length is not None and length <= MAX_HELD_BYTES:
        body = await _whole(answer)
        headers.popall("Content-Length", None)
        return Passed(web.Response(status=answer.status, headers=headers, body=body), body)
    return await _stream(answer, request, headers)


async def _whole(answer: Answer) -> bytes:
    try:
        return b"".join([answer.first, *[chunk async for chunk in answer.rest()]])
    except StreamBroken as error:
        raise WorkerLost("disconnected", f"{answer.url}: {error}") from error


async def _stream(answer: Answer, request: web.Request, headers: Mapping[str, str]) -> Passed:
    response = web.StreamResponse(status=answer.status, headers=headers)
    await response.prepare(request)
    end, events = answer.first, 0
    try:
        await response.write(answer.first)
        async for chunk in answer.rest():
            await response.write(chunk)
            end = chunk
            events += chunk.count(b"\ndata:") + chunk.startswith(b"data:")
    except StreamBroken as error:
        await _break_off(answer, request, response, end, error)
    else:
        await response.write_eof()
        return Passed(response, events=events)
    return Passed(response)


async def _break_off(
    answer: Answer,
    request: web.Request,
    response: web.StreamResponse,
    end: bytes,
    error: StreamBroken,
) -> None:
    """Tell the client what happened, then close without the end that a complete answer has."""
    log.warning("%s broke off its answer: %s", answer.url, error)
    if answer.is_event_stream and end.endswith((b"\n\n", b"\r\n\r\n")):
        told = UpstreamFailed("the worker failed in the middle of its answer; ask again")
        await response.write(b"data: " + error_body(told) + b"\n\n")
    if request.transport:
        request.transport.close()
