"""`WorkerRegistry`: which engines serve requests, as they say themselves, and what the operator
wishes of them. The other half of the meeting place of cluster and router; the blocks are in
`index`."""

import asyncio
import contextlib
import logging
from collections.abc import Callable

from prefixfleet.store.errors import ConfigError, IndexUnavailable
from prefixfleet.store.records import FleetWish, WorkerRecord
from prefixfleet.store.redis_functions import RedisFunctions
from prefixfleet.store.signed import Seals, Unsigned

MAX_CHANGES = 10
"""How often a change of the wish is tried again because another one came between."""

MAX_RECORD_BYTES = 2 << 20
"""Of a worker: far more than the most adapters of the longest names take."""

log = logging.getLogger(__name__)


class WorkerRegistry:
    """Workers of one fleet, in Redis. Owned by one event loop; connects at the first call.

    Every call raises `IndexUnavailable` instead of waiting past ``timeout_s``.
    """

    def __init__(
        self, url: str, fleet: str, *, secret: bytes = b"", timeout_s: float = 1.0
    ) -> None:
        """``secret`` is the cluster's; who reads or changes the wish needs it."""
        self._functions = RedisFunctions(url, fleet, "registry", timeout_s=timeout_s)
        self._seals = Seals(secret, fleet, "wish") if secret else None
        self._wishing = asyncio.Lock()  # what was read is judged before anything newer is written
        self._kept: tuple[int, bytes] | None = None  # the last sound wish, and its generation
        self.corrupt_records = 0

    async def prepare(self) -> None:
        """Check the server. Raises `ConfigError` or `IndexUnavailable`; see `RedisFunctions`."""
        await self._functions.prepare()

    async def announce(self, record: WorkerRecord, *, ttl_s: float) -> None:
        """Say that a worker is there for the next ``ttl_s`` seconds; replaces what it said last."""
        await self._functions.call("announce", record.worker, record.encode(), ttl_s)

    async def withdraw(self, worker: str) -> None:
        """Take a worker off at once; an unknown one is ignored."""
        await self._functions.call("withdraw", worker)

    async def workers(self) -> list[WorkerRecord]:
        """Who is there, by name. A record that cannot be read is left out, logged and counted."""
        records = []
        reply = await self._functions.ask("workers")
        if not isinstance(reply, list):
            raise IndexUnavailable(f"workers: got {reply!r:.80}, expected a list")
        for data in reply:
            try:
                if len(data) > MAX_RECORD_BYTES:
                    raise ConfigError(f"got {len(data)} bytes, expected {MAX_RECORD_BYTES} at most")
                records.append(WorkerRecord.decode(data))
            except (ConfigError, TypeError) as error:
                self.corrupt_records += 1
                log.warning("record of a worker ignored: %s", error)
        return sorted(records, key=lambda record: record.worker)

    async def wish(self) -> FleetWish:
        """What the operator wishes; at first, nothing. A server that has forgotten it is told.

        Raises:
            ConfigError: it is unreadable, not signed with the secret, or an older one again; or
                no secret is known here.
        """
        async with self._wishing:
            return self._opened(*await self._current_wish())

    async def change_wish(self, change: Callable[[FleetWish], FleetWish]) -> FleetWish:
        """Replace the wish by ``change`` of it, which may be called again; what it is then.

        One that is not signed, or an older one again, counts as nothing and is replaced.

        Raises:
            ConfigError: what is there now is unreadable, for example of another version.
        """
        for _ in range(MAX_CHANGES):
            async with self._wishing:
                generation, sealed = await self._current_wish()
                before = self._sound(generation, sealed)
                after = change(before or FleetWish())
                if after == before or await self._write_wish(generation, after):
                    return after
        raise IndexUnavailable(f"the fleet's wish changed {MAX_CHANGES} times meanwhile; try again")

    async def _write_wish(self, generation: int, wish: FleetWish) -> bool:
        seals = self._sealing()
        sealed = seals.seal("", wish.encode())
        if not await self._functions.call("change_wish", generation, sealed):
            return False
        seals.wrote("", sealed)
        self._kept = generation + 1, sealed
        return True

    async def _current_wish(self) -> tuple[int, bytes | None]:
        """What is stored; put back first where the server has forgotten what was seen here."""
        stored = await self._stored_wish()
        if self._kept is None or stored[0] >= self._kept[0] or self._is_sound(stored[1]):
            return stored
        if await self._functions.call("change_wish", stored[0], self._kept[1]):
            log.warning("Redis has forgotten the fleet's wish: put back")
        return await self._stored_wish()

    def _sealing(self) -> Seals:
        if self._seals is None:
            raise ConfigError(
                "the fleet's wish is signed with the cluster secret: set PREFIXFLEET_SECRET_FILE"
            )
        return self._seals

    def _opened(self, generation: int, sealed: bytes | None) -> FleetWish:
        seals = self._sealing()
        if sealed is None:
            return FleetWish()
        wish = FleetWish.decode(seals.open("", sealed))
        self._kept = generation, sealed
        return wish

    def _is_sound(self, sealed: bytes | None) -> bool:
        with contextlib.suppress(Unsigned):
            return sealed is not None and bool(self._sealing().open("", sealed))
        return False

    def _sound(self, generation: int, sealed: bytes | None) -> FleetWish | None:
        """None if that is to be replaced, whatever it says."""
        try:
            return self._opened(generation, sealed)
        except Unsigned as error:
            log.warning("to be replaced: %s", error)
            return None

    async def _stored_wish(self) -> tuple[int, bytes | None]:
        match await self._functions.ask("wish"):
            case [None, None]:
                return 0, None
            case [bytes(generation), bytes(sealed)] if generation.isdigit():
                return int(generation), sealed
            case reply:
                raise IndexUnavailable(f"wish: got {reply!r:.80}, expected generation and record")

    async def close(self) -> None:
        """Give back connections. What was announced stays until its time is over."""
        await self._functions.close()
