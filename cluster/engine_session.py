"""One engine's connection to the daemon: its questions become calls of the node's cache, and back.

Gives everything back when the connection ends. Must not know how blocks are kept, pulled or
published, nor what other connections there are.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import Any

from prefixfleet.cluster.engine_channel import (
    encode_frame,
    read_frame,
    split_hashes,
)
from prefixfleet.cluster.engine_questions import (
    Abandon,
    Commit,
    Discard,
    Hello,
    Prepare,
    Question,
    Release,
    Report,
    Reserve,
    parse_question,
)
from prefixfleet.cluster.node_cache import NodeCache
from prefixfleet.store.errors import ConfigError, FleetError, ProtocolError
from prefixfleet.store.records import Outcome

log = logging.getLogger(__name__)

HELLO_S = 10.0
"""A connection that has not said hello by then is closed."""
ANSWER_S = 10.0
"""An engine that does not read its answers for so long is dropped."""
MAX_PREPARES = 1024
"""Prefixes one connection may have in the making; one more is refused."""

Welcome = Callable[[Hello], Awaitable[tuple[NodeCache, dict[str, Any]]]]
"""Opens the cache for an engine: the cache and the fields of the answer. Raises `ConfigError`."""


class EngineSession:
    """One connection: its preparations in flight, and its name for what it holds."""

    def __init__(
        self,
        number: int,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        outcome: Callable[[Outcome], None],
    ) -> None:
        self._number = number
        self._reader = reader
        self._writer = writer
        self._outcome = outcome
        self._cache: NodeCache | None = None
        self.hello: Hello | None = None  # once it was made welcome
        self._preparing: dict[str, asyncio.Task[None]] = {}

    async def serve(self, welcome: Welcome) -> None:
        """Answer until the engine goes. Raises `ProtocolError`, `ConfigError`, `TimeoutError`."""
        try:
            await self._greet(welcome)
            while True:
                question = parse_question(await read_frame(self._reader))
                await self._handle(question)
                await self._drain()
        except (asyncio.IncompleteReadError, ConnectionError):
            return
        except ProtocolError as error:
            self._answer(0, {"error": str(error)})
            raise

    def end(self) -> None:
        """Give back all that this connection held."""
        for task in self._preparing.values():
            task.cancel()
        if self._cache is not None:
            self._cache.disconnect(self._number)
        self._writer.close()

    async def _greet(self, welcome: Welcome) -> None:
        async with asyncio.timeout(HELLO_S):
            hello = parse_question(await read_frame(self._reader))
        if not isinstance(hello, Hello):
            raise ProtocolError(f"engine channel: got {type(hello).__name__}, expected hello first")
        try:
            self._cache, fields = await welcome(hello)
        except ConfigError as error:
            self._answer(hello.id, {"error": str(error)})
            raise
        self.hello = hello
        self._answer(hello.id, fields)

    async def _handle(self, question: Question) -> None:
        if isinstance(question, Prepare):
            self._start_preparing(question)
            return
        try:
            fields = await self._do(question)
        except FleetError as error:
            if isinstance(error, ProtocolError):
                raise
            fields = {"error": str(error)}
        self._answer(question.id, fields)

    async def _do(self, question: Question) -> dict[str, Any]:
        assert self._cache is not None
        match question:
            case Release():
                self._release(question.request)
                self._cache.hit_times.copied(question.copied, question.copy_s)
            case Reserve():
                hashes = split_hashes(question.hashes)
                slots = await self._cache.reserve(
                    self._number, question.rank, question.parent_hash(), hashes
                )
                return {"slots": slots}
            case Commit():
                self._cache.commit(self._number, question.rank, split_hashes(question.hashes))
            case Abandon():
                self._cache.abandon(self._number, question.rank, split_hashes(question.hashes))
            case Discard():
                self._cache.discard(split_hashes(question.hashes))
            case Report():
                self._outcome(question.record())
            case _:
                raise ProtocolError("engine channel: hello twice on one connection")
        return {}

    def _release(self, request: str) -> None:
        assert self._cache is not None
        if (task := self._preparing.pop(request, None)) is not None:
            task.cancel()
        self._cache.release(self._number, request)

    def _start_preparing(self, question: Prepare) -> None:
        """Run beside the other questions: a pull takes its time, a release must not wait for it."""
        self._release(question.request)
        task = asyncio.create_task(self._prepare(question))
        self._preparing[question.request] = task
        task.add_done_callback(lambda _: self._prepared(question, task))

    def _prepared(self, question: Prepare, task: asyncio.Task[None]) -> None:
        if self._preparing.get(question.request) is task:
            del self._preparing[question.request]
        if task.cancelled():
            self._answer(question.id, {"error": "released"})
        elif (error := task.exception()) is not None:
            log.error("prepare failed", exc_info=error)
            self._writer.close()  # the engine must not wait for an answer that will not come

    async def _prepare(self, question: Prepare) -> None:
        assert self._cache is not None
        try:
            if len(self._preparing) > MAX_PREPARES:
                raise ConfigError(
                    f"{MAX_PREPARES} prefixes are being prepared, one more is refused"
                )
            prepared = await self._cache.prepare(
                self._number,
                question.request,
                split_hashes(question.chain),
                question.pull_plan(),
                question.budget_s,
            )
            fields = prepared.fields()
        except FleetError as error:
            fields = {"error": str(error)}
        self._answer(question.id, fields)

    def _answer(self, number: int, fields: dict[str, Any]) -> None:
        if not self._writer.is_closing():
            self._writer.write(encode_frame({"id": number, **fields}))

    async def _drain(self) -> None:
        """Read no further question while the engine does not read its answers."""
        try:
            async with asyncio.timeout(ANSWER_S):
                await self._writer.drain()
        except TimeoutError:
            self._writer.transport.abort()
            raise ProtocolError(f"engine does not read its answers for {ANSWER_S:g} s") from None
