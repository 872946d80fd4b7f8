"""Follows one TensorRT-LLM engine's KV events by polling its HTTP server, and says what it holds.

One question at a time, a bounded answer in a bounded time. A poll that fails drops nothing by
itself: the number of the next event says whether anything was lost. Only where nobody listens any
more the engine is gone, with all that it held. Of several routers one polls: an event is told once.
"""

import asyncio
import errno
import logging
import time
from collections.abc import AsyncGenerator, Awaitable, Callable

import aiohttp

from prefixfleet.store.engine_follower import Losses
from prefixfleet.store.engine_mirror import Change, EngineMirror
from prefixfleet.store.errors import IndexUnavailable, ProtocolError
from prefixfleet.store.trtllm_events import MAX_POLL_BYTES, PolledEvent, decode_poll
from prefixfleet.store.trtllm_mirror import PolledMirror

PATH = "/kv_cache_events"
POLL_LIMIT_S = 10.0
"""Older engines keep a question open for 2 s when they have nothing to tell."""
BUSY_S = 0.05  # between two polls that told something; a question costs the engine a few ms
IDLE_S = 0.5
FAILED_S = 2.0
HELD_UP_BYTES = 64 * 1024  # decoded at once, in 2 ms; more goes to a thread, or requests would wait
CLAIM_S = 2.0  # so often the right to poll is claimed again; it lasts five times as long
FAILURES_SHOWN = 3  # in a row: an engine that starts, or has seen no prompt yet, refuses a few

Claim = Callable[[str], Awaitable[bool]]
"""Whether this router may poll an engine: `store.poll_rights.PollRights.claim`."""

log = logging.getLogger(__name__)


class PollFailed(Exception):
    """Nothing was told; says why. ``is_gone``: nobody listens at the port."""

    def __init__(self, why: str, *, is_gone: bool = False) -> None:
        super().__init__(why)
        self.is_gone = is_gone


class EnginePoller:
    """Owned by one event loop. ``url`` is the engine's server, http://host:port.

    ``fault`` says what is wrong at the moment with what is believed; empty if all is well.
    """

    def __init__(
        self, mirror: EngineMirror, url: str, block_tokens: int, claim: Claim | None = None
    ) -> None:
        self._claim = claim
        self._is_mine = claim is None
        self._claimed_s = -CLAIM_S
        self._server = url
        self._polled = PolledMirror(mirror)
        self._url = url.rstrip("/") + PATH
        self._block_tokens = block_tokens
        self._failures = 0
        self._why = ""
        self.connected = False

    @property
    def losses(self) -> Losses:
        """What went wrong, counted."""
        return self._polled.losses

    @property
    def batches(self) -> int:
        """Polls that told something."""
        return self._polled.batches

    @property
    def whole(self) -> bool:
        """Whether the engine's first event was heard, and nothing was lost since."""
        return self._polled.whole

    @property
    def fault(self) -> str:
        """See the class."""
        if not self._is_mine:
            return f"another router of the fleet polls {self._server}: here it is routed by load"
        if self._failures >= FAILURES_SHOWN:
            return self._why
        if self._polled.is_losing:
            return (
                f"{self._url}: events were lost: another poller takes them, or the engine's "
                "buffer was full"
            )
        return ""

    async def changes(self) -> AsyncGenerator[Change, None]:
        """What the engine holds now and did not before, and back, one change a poll; until the
        caller stops. Close the iterator (`contextlib.aclosing`): it holds a connection."""
        pause_s = BUSY_S
        async with aiohttp.ClientSession(
            timeout=aiohttp.ClientTimeout(total=POLL_LIMIT_S)
        ) as session:
            while True:
                if not await self._may_poll():
                    yield self._polled.ended()
                    await asyncio.sleep(CLAIM_S)
                    continue
                try:
                    change, told = await self._poll(session)
                except PollFailed as failed:
                    yield self._note_failure(failed)
                    pause_s = FAILED_S
                else:
                    yield change
                    pause_s = BUSY_S if told else min(2 * pause_s, IDLE_S)
                await asyncio.sleep(pause_s)

    async def _may_poll(self) -> bool:
        """Where nobody can say whose right it is, it stays whose it was."""
        if self._claim and time.monotonic() - self._claimed_s >= CLAIM_S:
            try:
                self._is_mine = await self._claim(self._server)
            except IndexUnavailable as error:
                log.debug("%s: the right to poll stays whose it was: %s", self._server, error)
            self._claimed_s = time.monotonic()
        return self._is_mine

    async def _poll(self, session: aiohttp.ClientSession) -> tuple[Change, bool]:
        """The change, and whether anything was told."""
        body = await self._ask(session)
        self._failures, self.connected = 0, True
        try:
            events = await self._decoded(body)
        except ProtocolError as error:
            log.warning("%s: a poll's events are dropped, and all known: %s", self._url, error)
            return self._polled.lost(), True
        return self._polled.take(events), bool(events)

    async def _decoded(self, body: bytes) -> tuple[PolledEvent, ...]:
        if len(body) <= HELD_UP_BYTES:
            return decode_poll(body, self._block_tokens)
        return await asyncio.to_thread(decode_poll, body, self._block_tokens)

    async def _ask(self, session: aiohttp.ClientSession) -> bytes:
        try:
            async with session.post(self._url) as response:
                if response.status != 200:
                    raise PollFailed(f"{self._url}: status {response.status}")
                return await self._read(response)
        except (TimeoutError, aiohttp.ClientError, OSError) as error:
            why = f"{self._url}: {type(error).__name__}: {error}"
            refused = isinstance(error, OSError) and error.errno == errno.ECONNREFUSED
            raise PollFailed(why, is_gone=refused) from error

    async def _read(self, response: aiohttp.ClientResponse) -> bytes:
        body = bytearray()
        async for chunk in response.content.iter_any():
            body += chunk
            if len(body) > MAX_POLL_BYTES:
                raise PollFailed(f"{self._url}: more than {MAX_POLL_BYTES} bytes of events")
        return bytes(body)

    def _note_failure(self, failed: PollFailed) -> Change:
        self._failures += 1
        self._why, self.connected = str(failed), False
        return self._polled.ended() if failed.is_gone else Change()
