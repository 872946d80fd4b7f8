"""The engine's end of `engine_channel`: a connection that heals itself, owned by its own thread.

Questions come from the engine's threads and never wait here; answers are futures. While the
daemon is away every question fails at once. Must not know blocks, pools or vLLM.
"""

import asyncio
import itertools
import logging
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, TypeAlias

import msgspec

from prefixfleet.cluster.engine_channel import CHANNEL_VERSION, encode_frame, read_frame
from prefixfleet.store.errors import (
    DeadlineExceeded,
    FleetError,
    PeerLost,
    PeerRefused,
    ProtocolError,
)
from prefixfleet.store.namespace import DIGEST_BYTES

log = logging.getLogger(__name__)

CONNECT_S = 5.0
"""For the connection and the answer to hello together."""
FIRST_RETRY_S = 0.05
LAST_RETRY_S = 2.0
MAX_OUTSTANDING = 4096
"""Questions without an answer; one more fails at once."""

Answer: TypeAlias = "Future[dict[str, Any]]"
"""The answer's fields, or one of `PeerLost`, `PeerRefused`, `DeadlineExceeded`, `ProtocolError`."""


@dataclass(frozen=True, slots=True)
class Welcome:
    """What the daemon says of itself in its answer to hello.

    ``connection`` counts the client's connections: two that differ may be two daemons.
    """

    connection: int
    node: str
    epoch: int
    pool_path: str
    pool_bytes: Annotated[int, msgspec.Meta(ge=1)]
    hash_key: bytes = field(repr=False)
    namespace_digest: Annotated[
        bytes, msgspec.Meta(min_length=DIGEST_BYTES, max_length=DIGEST_BYTES)
    ]


class EngineClient:
    """One connection to the node's daemon, kept up from `start` to `close`.

    Owned by the thread that `start` makes; `ask` may be called from any thread. Every question
    has a deadline. A question whose deadline passes without an answer ends the connection: a
    daemon that keeps one waiting keeps them all waiting, and a new connection is free of pins.
    """

    def __init__(self, path: Path, hello: Mapping[str, Any]) -> None:
        self._path = path
        self._hello = {"op": "hello", "version": CHANNEL_VERSION, **hello}
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread = threading.Thread(target=self._serve, name="prefixfleet-channel", daemon=True)
        self._closing = asyncio.Event()
        self._ids = itertools.count(1)
        self._connections = itertools.count(1)
        self._pending: dict[int, tuple[Answer, asyncio.TimerHandle]] = {}
        self._writer: asyncio.StreamWriter | None = None
        self._settled = threading.Event()
        self.welcome: Welcome | None = None
        """None while there is no daemon. Read from any thread."""
        self.refusal = ""
        """Why the daemon said no to the latest hello; empty once it said yes."""
        self.losses = 0

    def start(self) -> None:
        """Begin to connect."""
        self._loop = asyncio.new_event_loop()
        self._thread.start()

    def close(self) -> None:
        """End the connection and the thread; outstanding questions fail."""
        self._call(self._stop)
        if self._thread.is_alive():
            self._thread.join(CONNECT_S)

    def settle(self, timeout_s: float) -> Welcome | None:
        """Wait for the end of the first attempt to connect; the welcome as it is then."""
        self._settled.wait(timeout_s)
        return self.welcome

    def ask(self, op: str, *, within_s: float, **fields: Any) -> Answer:  # noqa: ANN401 - msgpack
        """Send a question; returns at once."""
        answer: Answer = Future()
        answer.set_running_or_notify_cancel()  # a waiter that gives up must not end our thread
        if not self._call(self._send, answer, {"op": op, **fields}, within_s):
            answer.set_exception(PeerLost("the engine channel is closed"))
        return answer

    def _call(self, function: Callable[..., None], *arguments: object) -> bool:
        """Run ``function`` in the loop's thread, soon; False if there is no loop any more."""
        if self._loop is None:
            return False
        try:
            self._loop.call_soon_threadsafe(function, *arguments)
        except RuntimeError:  # closed
            return False
        return True

    def _serve(self) -> None:
        assert self._loop is not None
        loop = self._loop
        with asyncio.Runner(loop_factory=lambda: loop) as runner:
            runner.run(self._keep_connected())

    def _stop(self) -> None:
        self._closing.set()
        self._drop()

    def _drop(self) -> None:
        if self._writer is not None:
            self._writer.transport.abort()

    async def _keep_connected(self) -> None:
        retry_s = FIRST_RETRY_S
        while not self._closing.is_set():
            try:
                await self._session()
            except (OSError, EOFError, FleetError, TimeoutError) as error:
                if self.welcome is not None:
                    retry_s = FIRST_RETRY_S
                self._lost(error)
            self._settled.set()
            try:
                await asyncio.wait_for(self._closing.wait(), retry_s)
            except TimeoutError:
                retry_s = min(2 * retry_s, LAST_RETRY_S)

    async def _session(self) -> None:
        """One connection, from connect to its end, which is always an exception."""
        async with asyncio.timeout(CONNECT_S):
            reader, self._writer = await asyncio.open_unix_connection(self._path)
            self._writer.write(encode_frame({"id": 0, **self._hello}))
            answer = await read_frame(reader)
        self._greeted(answer)
        while True:
            self._resolve(await read_frame(reader))

    def _greeted(self, answer: dict[str, Any]) -> None:
        self.refusal = str(answer.get("error", ""))
        if self.refusal:
            raise PeerRefused(self.refusal)
        try:
            fields = {**answer, "connection": next(self._connections)}
            fields.pop("id", None)
            self.welcome = msgspec.convert(fields, Welcome, builtin_types=(bytes,))
        except msgspec.ValidationError as error:
            raise ProtocolError(f"engine channel: answer to hello: {error}") from error
        if self.losses:
            log.warning("node daemon at %s is back", self._path)
        self._settled.set()

    def _lost(self, error: Exception) -> None:
        if self._closing.is_set():
            log.debug("engine channel closed")
        elif self.losses == 0 or self.welcome is not None:
            log.warning(
                "no node daemon at %s (%s: %s): every lookup is a miss until it is back",
                self._path,
                type(error).__name__,
                error,
            )
            self.losses += 1
        self.welcome = None
        self._drop()
        self._writer = None
        for number in list(self._pending):
            self._fail(number, PeerLost("the connection to the node daemon ended"))

    def _send(self, answer: Answer, question: dict[str, Any], within_s: float) -> None:
        if self.welcome is None or self._writer is None:
            answer.set_exception(PeerLost("there is no node daemon"))
            return
        if len(self._pending) >= MAX_OUTSTANDING:
            answer.set_exception(PeerLost(f"{MAX_OUTSTANDING} questions wait for the node daemon"))
            return
        number = next(self._ids)
        try:
            frame = encode_frame({"id": number, **question})
        except ProtocolError as error:
            answer.set_exception(error)
            return
        timer = asyncio.get_running_loop().call_later(
            within_s, self._expire, number, question["op"], within_s
        )
        self._pending[number] = (answer, timer)
        self._writer.write(frame)

    def _resolve(self, message: dict[str, Any]) -> None:
        number, why = message.pop("id", None), message.get("error")
        if not isinstance(number, int):
            raise ProtocolError(
                f"engine channel: got an answer of id {number!r}, expected a number"
            )
        if number == 0:  # the daemon could not read a question, and closes
            raise ProtocolError(f"the node daemon refused a frame: {why}")
        if number not in self._pending:
            return
        if why is None:
            answer, timer = self._pending.pop(number)
            timer.cancel()
            answer.set_result(message)
        else:
            self._fail(number, PeerRefused(str(why)))

    def _expire(self, number: int, op: str, within_s: float) -> None:
        self._fail(number, DeadlineExceeded(f"no answer to {op!r} within {within_s:g} s"))
        self._drop()

    def _fail(self, number: int, error: FleetError) -> None:
        answer, timer = self._pending.pop(number)
        timer.cancel()
        answer.set_exception(error)
