"""One request to one worker: sending it, and telling what kind of failure it was.

Nothing is answered to the client here. Until the first byte of the body has come back a request
may be sent again: once on the same worker if it met a connection that the worker had already
closed, else on another worker.
"""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import aiohttp
from multidict import CIMultiDict

KEEP_ALIVE_S = 4.0
"""Idle connections are closed after this. vLLM and SGLang close theirs after 5 s: be first."""

RETRY_STATUSES = {502, 503, 504}


class WorkerLost(Exception):
    """The worker failed before its first byte. ``reason`` is a label with few values."""

    def __init__(self, reason: str, detail: str) -> None:
        super().__init__(detail)
        self.reason = reason


class StreamBroken(Exception):
    """The worker failed after its first byte: nothing can be sent again."""


@dataclass(frozen=True, slots=True)
class Answer:
    """An upstream answer whose first bytes are there: ``first`` is empty only if all is."""

    response: aiohttp.ClientResponse
    first: bytes

    async def rest(self) -> AsyncIterator[bytes]:
        """What follows ``first``, as it arrives. Raises `StreamBroken`."""
        try:
            async for chunk in self.response.content.iter_any():
                yield chunk
        except (TimeoutError, aiohttp.ClientError, OSError) as error:
            raise StreamBroken(f"{type(error).__name__}: {error}") from error


def upstream_session(
    *, connect_timeout_s: float, silence_timeout_s: float
) -> aiohttp.ClientSession:
    """The router's one client: no limit on connections, answers passed on as they are."""
    trace = aiohttp.TraceConfig()
    trace.on_connection_reuseconn.append(_note_reuse)
    return aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=KEEP_ALIVE_S),
        timeout=aiohttp.ClientTimeout(
            total=None, sock_connect=connect_timeout_s, sock_read=silence_timeout_s
        ),
        auto_decompress=False,
        cookie_jar=aiohttp.DummyCookieJar(),
        skip_auto_headers=("User-Agent", "Accept", "Content-Type"),
        trace_configs=[trace],
    )


@asynccontextmanager
async def ask(
    session: aiohttp.ClientSession, method: str, url: str, headers: CIMultiDict[str], body: bytes
) -> AsyncIterator[Answer]:
    """The worker's answer with its first bytes. Leaving the block early cancels it upstream.

    Raises:
        WorkerLost: nothing came back; another worker may be asked.
    """
    response = await _send(session, method, url, headers, body)
    try:
        if response.status in RETRY_STATUSES:
            raise WorkerLost("status", f"{url}: status {response.status}")
        yield Answer(response, await _first_bytes(response, url))
    finally:
        # closes the connection unless the whole answer was read: the engine sees it and aborts
        response.release() if response.content.is_eof() else response.close()


async def _send(
    session: aiohttp.ClientSession, method: str, url: str, headers: CIMultiDict[str], body: bytes
) -> aiohttp.ClientResponse:
    for attempt in (1, 2):
        seen = SimpleNamespace(reused=False)
        try:
            return await session.request(
                method,
                url,
                data=body,
                headers=headers,
                allow_redirects=False,
                trace_request_ctx=seen,
            )
        except (TimeoutError, aiohttp.ClientError, OSError) as error:
            if attempt == 1 and may_resend(error, reused=seen.reused):
                continue
            raise WorkerLost(_reason(error), f"{url}: {type(error).__name__}: {error}") from error
    raise AssertionError("unreachable")


def may_resend(error: BaseException, *, reused: bool) -> bool:
    """Whether the same worker may be asked once more.

    Only if the connection was an idle one that the worker closed under us: then it saw nothing
    of the request, or dropped it unread. A fresh connection that breaks is a failure.
    """
    return reused and isinstance(
        error, aiohttp.ServerDisconnectedError | aiohttp.ClientOSError | ConnectionError
    )


async def _first_bytes(response: aiohttp.ClientResponse, url: str) -> bytes:
    try:
        return await response.content.readany()
    except (TimeoutError, aiohttp.ClientError, OSError) as error:
        raise WorkerLost(_reason(error), f"{url}: {type(error).__name__}: {error}") from error


def _reason(error: BaseException) -> str:
    if isinstance(error, aiohttp.ClientConnectorError | aiohttp.ConnectionTimeoutError):
        return "connect"
    return "timeout" if isinstance(error, asyncio.TimeoutError) else "disconnected"


async def _note_reuse(session: Any, context: SimpleNamespace, params: Any) -> None:  # noqa: ANN401
    if context.trace_request_ctx is not None:  # a prompt's request, not a probe or a hint
        context.trace_request_ctx.reused = True
