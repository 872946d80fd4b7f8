"""An upstream answer to the client, byte for byte: nothing is parsed, cut or joined.

A short whole answer is held until it is complete, so that a worker that breaks it off can still
be replaced; a stream is passed on as its bytes arrive, and what breaks then is told to the client.
"""

import logging
from collections.abc import Callable, Mapping

from prefixfleet.router.client import Client
from prefixfleet.router.errors import UpstreamFailed, error_event
from prefixfleet.router.headers import AnswerHeaders
from prefixfleet.router.upstream import Answer, StreamBroken, WorkerLost

MAX_HELD_BYTES = 1 << 20

log = logging.getLogger(__name__)


async def pass_on(
    answer: Answer,
    client: Client,
    ours: Mapping[str, str],
    broke_off: Callable[[], object],
    *,
    anthropic: bool = False,
) -> bytes:
    """Passes all of it; the body if it was held, else nothing. ``broke_off`` is told of an answer
    that ends too early; its client too, in the shape of its API.

    Raises:
        WorkerLost: the worker broke off an answer of which the client has nothing yet.
    """
    passing, length = answer.head.passing, answer.content_length
    if length is not None and length <= MAX_HELD_BYTES:
        body = answer.first if len(answer.first) == length else await _whole(answer)
        client.answer(answer.status, AnswerHeaders(ours, passing), body)
        return body
    await client.begin(answer, AnswerHeaders(ours, passing, length))
    try:
        await client.relay(answer)
    except StreamBroken as error:
        broke_off()
        await _break_off(answer, client, error, anthropic)
    else:
        await client.end()
    return b""


async def _whole(answer: Answer) -> bytes:
    try:
        return b"".join([answer.first, *[chunk async for chunk in answer.rest()]])
    except StreamBroken as error:
        raise WorkerLost("disconnected", f"{answer.url}: {error}") from error


async def _break_off(answer: Answer, client: Client, error: StreamBroken, anthropic: bool) -> None:
    """Tell the client what happened, then close without the end that a complete answer has."""
    log.warning("request %s: %s broke off its answer: %s", client.called, answer.url, error)
    client.events = 0  # nobody shall learn a pace from it
    if answer.is_event_stream and client.last.endswith((b"\n\n", b"\r\n\r\n")):
        told = UpstreamFailed("the worker failed in the middle of its answer; ask again")
        await client.write(error_event(told, anthropic=anthropic))
    client.hang_up()
