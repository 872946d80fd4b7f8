"""Follows one TensorRT-LLM engine's KV events by polling its HTTP server, and says what it holds.

One question at a time, a bounded answer in a bounded time. A poll that fails drops nothing by
itself: the number of the next event says whether anything was lost. Only where nobody listens any
more the engine is gone, with all that it held. Of several routers one polls: an event is told once.
"""

import asyncio
import errno
import logging
import ssl
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator

import aiohttp

from prefixfleet.store.engine_mirror import Change, EngineMirror
from prefixfleet.store.errors import IndexUnavailable, ProtocolError
from prefixfleet.store.following import Losses
from prefixfleet.store.poll_rights import RIGHT_S
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
    """Owned by one event loop. ``url`` is the engine's server, http://host:port; ``tls`` is for
    https, the system's own trust without it.

    ``fault`` says what is wrong at the moment with what is believed; empty if all is well.
    """

    def __init__(
        self,
        mirror: EngineMirror,
        url: str,
        block_tokens: int,
        claim: Claim | None = None,
        tls: ssl.SSLContext | None = None,
    ) -> None:
        self._claim = claim
        self._tls = tls
        self._is_mine = claim is None
        self._claimed_s = -CLAIM_S
        self._renewed_s = -RIGHT_S
        self._unclear = ""  # why nobody can say whose the right is
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
    def elsewhere(self) -> bool:
        """Whether another router of the fleet polls it, as it should be: here it is routed by
        load.
        """
        return not self._is_mine and self._renewed_s > -RIGHT_S and not self._unclear

    @property
    def fault(self) -> str:
        """See the class."""
        if self.elsewhere:
            return ""
        if not self._is_mine and self._unclear:
            return f"nobody can say which router polls {self._server}: {self._unclear}"
        if self._failures >= FAILURES_SHOWN:
            return self._why
        if self._polled.is_losing:
            return (
                f"{self._url}: events were lost: another poller takes them, the engine's buffer "
                "was full, or they were too many or could not be read"
            )
        return ""

    async def changes(self) -> AsyncGenerator[Change, None]:
        """What the engine holds now and did not before, and back, one or more changes a poll;
        until the caller stops.

        Close the iterator (`contextlib.aclosing`): it holds a connection.
        """
        pause_s = BUSY_S
        async with aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(ssl=self._tls or True),
            timeout=aiohttp.ClientTimeout(total=POLL_LIMIT_S),
        ) as session:
            while True:
                found, pause_s = await self._poll(session, pause_s)
                for change in found:
                    yield change
                    await asyncio.sleep(0)  # a poll may tell a lot: requests must not wait for it
                await asyncio.sleep(pause_s)

    def forget(self) -> None:
        """Nothing is known any more; `changes` may be called again."""
        for _ in self._polled.ended():
            pass

    async def _may_poll(self) -> bool:
        """Where nobody can say whose right it is, it stays whose it was for as long as it lasts."""
        if self._claim and time.monotonic() - self._claimed_s >= CLAIM_S:
            now = time.monotonic()
            try:
                self._is_mine, self._unclear = await self._claim(self._server), ""
                self._renewed_s = now
            except IndexUnavailable as error:
                self._unclear = str(error)
            self._claimed_s = time.monotonic()
        if self._claim and time.monotonic() - self._renewed_s >= RIGHT_S:
            self._is_mine = False
        return self._is_mine

    async def _poll(
        self, session: aiohttp.ClientSession, pause_s: float
    ) -> tuple[Iterator[Change], float]:
        """The changes, and how long to wait then; it was ``pause_s`` before."""
        if not await self._may_poll():
            return self._polled.ended(), CLAIM_S
        try:
            body = await self._ask(session)
        except PollFailed as failed:
            return self._note_failure(failed), FAILED_S
        self._failures, self.connected = 0, True
        try:
            events = await self._decoded(body)
        except ProtocolError as error:
            log.warning("%s: a poll's events are dropped, and all known: %s", self._url, error)
            return self._polled.lost(), BUSY_S
        return self._polled.take(events), BUSY_S if events else min(2 * pause_s, IDLE_S)

    async def _decoded(self, body: bytes) -> tuple[PolledEvent, ...]:
        if len(body) <= HELD_UP_BYTES:
            return decode_poll(body, self._block_tokens)
        return await asyncio.to_thread(decode_poll, body, self._block_tokens)

    async def _ask(self, session: aiohttp.ClientSession) -> bytes:
        try:
            # whoever answers there must not choose whom the router asks
            async with session.post(self._url, allow_redirects=False) as response:
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

    def _note_failure(self, failed: PollFailed) -> Iterator[Change]:
        self._failures += 1
        self._why, self.connected = str(failed), False
        return self._polled.ended() if failed.is_gone else iter([Change()])
