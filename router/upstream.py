"""One request to one worker: sending it, and telling what kind of failure it was.

Nothing is answered to the client here. Until the first byte of the body has come back a request
may be sent again: once on the same worker if it met a connection that the worker had already
closed, else on another worker.
"""

from collections.abc import AsyncIterator

from msgspec import Struct

from prefixfleet.router.connection import Connection, ConnectionClosed, Sink
from prefixfleet.router.framing import Head
from prefixfleet.router.headers import retry_after_of
from prefixfleet.router.pool import Pool

RETRY_STATUSES = {502, 503, 504}
RETRY_AFTER_S = 1.0


class WorkerLost(Exception):
    """The worker failed before its first byte. ``reason`` is a label with few values;
    ``retry_after_s`` is when it may be asked again, as it says or as a rule."""

    def __init__(self, reason: str, detail: str, retry_after_s: float = RETRY_AFTER_S) -> None:
        super().__init__(detail)
        self.reason = reason
        self.retry_after_s = retry_after_s


class StreamBroken(Exception):
    """The worker failed after its first byte: nothing can be sent again."""


class Answer(Struct, frozen=True):
    """An upstream answer whose first bytes are there: ``first`` is empty only if all is."""

    url: str
    status: int
    head: Head
    first: bytes
    connection: Connection
    _pool: Pool
    _worker_url: str

    async def rest(self) -> AsyncIterator[bytes]:
        """What follows ``first``, as it arrives. Raises `StreamBroken`."""
        try:
            while chunk := await self.connection.read():
                yield chunk
        except ConnectionClosed as error:
            raise StreamBroken(str(error)) from error

    async def relay(self, sink: Sink) -> None:
        """Like `rest`, without waking a task for every part. Raises `StreamBroken`."""
        try:
            await self.connection.relay(sink)
        except ConnectionClosed as error:
            raise StreamBroken(str(error)) from error

    def release(self) -> None:
        """The answer is not needed any more. If it is not complete its connection is closed: the
        engine sees it and aborts. To be called however the request ends."""
        self._pool.give_back(self._worker_url, self.connection)

    @property
    def content_length(self) -> int | None:
        """Bytes of the whole body, where the worker said so."""
        return self.head.length

    @property
    def is_event_stream(self) -> bool:
        """Whether the body is a stream of server-sent events."""
        return self.head.headers.get("Content-Type", "").startswith("text/event-stream")


async def ask(
    pool: Pool, url: str, path: str, lines: str, body: bytes, method: str = "POST"
) -> Answer:
    """The answer of the worker at ``url``, with its first bytes; `Answer.release` it.

    ``lines`` are those of the request's head, each with its end, but for its host and length.
    ``method`` may be sent again, and its answer has a body: POST (of what an engine computes) or
    GET (the ``body`` is empty).

    Raises:
        WorkerLost: nothing came back; another worker may be asked.
    """
    request = _encode(pool, url, path, lines, body, method)
    connection, head = await _send(pool, url, request)
    try:
        if head.status in RETRY_STATUSES:
            after_s = retry_after_of(head.headers) or RETRY_AFTER_S
            raise WorkerLost("status", f"{url}: status {head.status}", after_s)
        try:
            first = await connection.read()
        except ConnectionClosed as error:
            raise _lost(url, connection, error) from error
    except BaseException:  # the client left: the engine must see it at once
        pool.give_back(url, connection)
        raise
    return Answer(url + path, head.status, head, first, connection, pool, url)


async def _send(pool: Pool, url: str, request: bytes) -> tuple[Connection, Head]:
    """The connection on which the answer's head came."""
    connection = pool.take_idle(url)
    reused = connection is not None
    while True:
        connection = connection or await _connect(pool, url)
        try:
            connection.send(request)
            return connection, await connection.head()
        except ConnectionClosed as error:
            pool.give_back(url, connection)
            if not may_resend(connection, reused=reused):
                raise _lost(url, connection, error) from error
        except BaseException:  # the client left: the engine must see it at once
            pool.give_back(url, connection)
            raise
        connection, reused = None, False


def may_resend(connection: Connection, *, reused: bool) -> bool:
    """Whether the same worker may be asked once more.

    Only if the connection was an idle one that the worker closed under us: then it saw nothing
    of the request, or dropped it unread. A fresh connection that breaks is a failure.
    """
    return reused and not connection.answered and not connection.timed_out


async def _connect(pool: Pool, url: str) -> Connection:
    try:
        return await pool.connect(url)
    except (OSError, ValueError) as error:  # a TimeoutError is an OSError
        raise WorkerLost("connect", f"{url}: {type(error).__name__}: {error}") from error


def _encode(pool: Pool, url: str, path: str, lines: str, body: bytes, method: str) -> bytes:
    target = pool.target(url)
    first = f"{method} {target.base_path}{path} HTTP/1.1\r\nHost: {target.host_header}\r\n"
    length = "" if method == "GET" else f"Content-Length: {len(body)}\r\n"
    head = f"{first}{lines}{length}\r\n"
    return head.encode("utf-8", "surrogateescape") + body


def _lost(url: str, connection: Connection, error: ConnectionClosed) -> WorkerLost:
    return WorkerLost("timeout" if connection.timed_out else "disconnected", f"{url}: {error}")
