"""The short way in and out for plain requests of prompts, beside aiohttp on the same connections.

What `plain_head` can read is served here, in one task, with one write for head and first bytes, and
a stream's bytes go from socket to socket without waking it. Everything else is handed over to
aiohttp, with all that was read of it, and its connection stays there.
"""

import asyncio
from typing import TYPE_CHECKING, Any

from aiohttp import HttpVersion11, web
from aiohttp.web_protocol import RequestHandler

from prefixfleet.router.bursts import Bursts
from prefixfleet.router.edge import Edge
from prefixfleet.router.lane_client import LaneClient
from prefixfleet.router.plain_request import NotPlain, PlainHead, plain_head

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Mapping

    Serve = Callable[[LaneClient], Awaitable[None]]

PATIENCE_S = 1.0  # for the rest of a body; then aiohttp waits for it, under its own limit
MAX_AHEAD_BYTES = 64 * 1024  # that a client may send before it has its answer


class Lane(RequestHandler):
    """One client's connection. Owned by the server's event loop."""

    __slots__ = (
        "_client",
        "_edge",
        "_handed_over",
        "_head",
        "_heard",
        "_patience",
        "_routes",
        "_serving",
        "_unread",
    )

    def __init__(
        self,
        routes: "Mapping[str, Serve]",
        edge: Edge,
        server: web.Server,
        **options: Any,  # noqa: ANN401
    ) -> None:
        super().__init__(server, **options)
        self._routes = routes
        self._edge = edge
        self._unread: asyncio.TimerHandle | None = None
        self._heard = b""
        self._head: PlainHead | None = None
        self._handed_over = False
        self._patience: asyncio.TimerHandle | None = None
        self._serving: asyncio.Task[None] | None = None
        self._client: LaneClient | None = None

    def data_received(self, data: bytes) -> None:
        """Called by the loop."""
        if self._handed_over or self._close or self._force_close:
            return super().data_received(data)
        self._heard = self._heard + data if self._heard else data
        if self._serving is None:
            self._look()
        elif len(self._heard) > MAX_AHEAD_BYTES and not self._buffer_paused:
            self._pause_reading_for_buffer()
        return None

    def pause_writing(self) -> None:
        """Called by the loop: the client reads slower than its engine writes."""
        super().pause_writing()
        if self._client is not None:
            self._client.hold()
        if self.transport is not None:  # aiohttp drops its own when it closes, the socket may stay
            self._unread = self._loop.call_later(self._edge.unread_s, self._cut_off, self.transport)

    def resume_writing(self) -> None:
        """Called by the loop."""
        super().resume_writing()
        self._stop_watching_reads()
        if self._client is not None:
            self._client.release()

    def _cut_off(self, transport: asyncio.Transport) -> None:
        """Who reads nothing must not keep a place for ever: its request ends with it."""
        self._edge.unread()
        transport.abort()

    def _stop_watching_reads(self) -> None:
        if self._unread is not None:
            self._unread.cancel()
            self._unread = None

    def connection_lost(self, error: BaseException | None) -> None:
        """Called by the loop: the client is gone, and its engine shall know."""
        if self._serving is not None:
            self._serving.cancel()
        self._stop_waiting()
        self._stop_watching_reads()
        super().connection_lost(error)

    def handle_error(
        self,
        request: web.BaseRequest,
        status: int = 500,
        exc: BaseException | None = None,
        message: str | None = None,
    ) -> web.StreamResponse:
        """Called by aiohttp for what it cannot parse, and for its own faults."""
        if status >= 500:
            self.log_exception("a fault outside of any route", exc_info=exc)
        if request.writer.output_size > 0:
            raise ConnectionError("an answer has begun on this connection")
        request._version = HttpVersion11  # aiohttp takes what it cannot read for 1.0
        what = (message or "").partition("\n")[0].rstrip(": ")  # the rest quotes what was sent
        told = f"the request cannot be read: {what or 'see the log'}"
        return self._edge.refusal(status, told, request.headers)

    async def finish_response(
        self, request: web.BaseRequest, resp: web.StreamResponse, start_time: float | None
    ) -> tuple[web.StreamResponse, bool]:
        """Called by aiohttp; what it raises before any route (417) gets our shape here."""
        if isinstance(resp, web.HTTPException):
            told = f"{resp.reason}: {resp.text}"
            resp = self._edge.refusal(resp.status, told, request.headers)
        return await super().finish_response(request, resp, start_time)

    async def shutdown(self, timeout: float | None = 15.0) -> None:  # noqa: ASYNC109 - aiohttp's
        """Let the answer end for ``timeout`` seconds, then close."""
        if self._serving is not None:
            await asyncio.wait([self._serving], timeout=timeout)
            if self._serving is not None:
                self._serving.cancel()
        await super().shutdown(timeout)

    def _process_keepalive(self) -> None:
        if self._serving is not None:  # aiohttp believes that this connection is idle
            self._put_off_closing()
        super()._process_keepalive()

    def _put_off_closing(self) -> None:
        self._next_keepalive_close_time = self._loop.time() + self.keepalive_timeout

    def _look(self) -> None:
        """Begin with the next request if it is there."""
        try:
            head = self._head or plain_head(self._heard)
        except NotPlain:
            return self._hand_over()
        if head is None:
            return None
        serve = self._routes.get(head.fields.path)
        if serve is None:
            return self._hand_over()
        whole = head.start + head.body_bytes
        if len(self._heard) < whole:
            self._head = head
            if self._patience is None:
                self._patience = self._loop.call_later(PATIENCE_S, self._hand_over)
            return None
        self._stop_waiting()
        body, self._heard, self._head = self._heard[head.start : whole], self._heard[whole:], None
        assert self.transport is not None
        self._client = LaneClient(self, self.transport, head, body)
        self._serving = self._loop.create_task(self._serve(serve, self._client))
        return None

    async def _serve(self, serve: "Serve", client: LaneClient) -> None:
        try:
            await serve(client)
        except asyncio.CancelledError:
            client.hang_up()
            raise
        except ConnectionError:
            client.hang_up()  # the client is gone
        finally:
            self._serving = self._client = None
            self._put_off_closing()
        if self.transport is None or self._force_close:
            return
        if self._close:
            self.transport.close()
            return
        if self._buffer_paused:
            self._resume_reading_for_buffer()
        if self._heard:
            self._look()

    def _hand_over(self) -> None:
        self._stop_waiting()
        self._handed_over = True
        heard, self._heard, self._head = self._heard, b"", None
        super().data_received(heard)

    def _stop_waiting(self) -> None:
        if self._patience is not None:
            self._patience.cancel()
            self._patience = None


class LaneServer(web.Server):
    """aiohttp's server, with the plain requests of ``routes`` served by their functions."""

    def __init__(self, routes: "Mapping[str, Serve]", edge: Edge, server: web.Server) -> None:
        """In the place of ``server``, which must not have been used."""
        self.__dict__.update(server.__dict__)
        self._routes = routes
        self._edge = edge
        self.bursts: Bursts | None = None  # who accepts what else waits

    def __call__(self) -> RequestHandler:
        """A connection was accepted."""
        if self.bursts is not None:
            self.bursts.accepted()
        return Lane(self._routes, self._edge, self, loop=self._loop, **self._kwargs)


class LaneRunner(web.AppRunner):
    """aiohttp's runner of an application, with a `LaneServer`."""

    __slots__ = ("_edge", "_routes")

    def __init__(
        self,
        app: web.Application,
        routes: "Mapping[str, Serve]",
        edge: Edge,
        **options: Any,  # noqa: ANN401
    ) -> None:
        super().__init__(app, **options)
        self._routes = routes
        self._edge = edge

    @property
    def lanes(self) -> LaneServer:
        """Its server, after `setup`."""
        assert isinstance(self.server, LaneServer)
        return self.server

    async def _make_server(self) -> web.Server:
        return LaneServer(self._routes, self._edge, await super()._make_server())
