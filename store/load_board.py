"""What each router has in flight on each worker, in Redis, so that routers see each other's load.

One hash behind the fleet's prefix: router_loads, router -> record. A router writes its record
again and again, each time with a higher beat; a reader stops counting a record whose beat stands
still for `EXPIRY_S` of the reader's own time, so no two clocks are compared: what a router that
was killed had reserved expires. Records that stand still for `SWEEP_S` are deleted.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Annotated

import msgspec

from prefixfleet.store.errors import IndexUnavailable
from prefixfleet.store.redis_functions import RedisFunctions

EXPIRY_S = 2.0
SWEEP_S = 60.0
MAX_ROUTERS = 1_000
WAITING = ""
"""Among the workers' names: what waits in a router for one of them; its ``busy_s`` is the prefill
of all of it."""

Count = Annotated[int, msgspec.Meta(ge=0, le=1 << 53)]
Seconds = Annotated[float, msgspec.Meta(ge=0, le=86_400)]


class SharedLoad(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """One router's part in one worker's load; see `router.book.Load`."""

    queued_tokens: Count
    queued_requests: Count
    decoding: Count
    busy_s: Seconds


class _Record(msgspec.Struct, frozen=True, array_like=True):
    beat: Count
    loads: dict[str, SharedLoad]


@dataclass(slots=True)
class _Seen:
    beat: int
    since_s: float


class LoadBoard:
    """The board of one fleet, as router ``me`` uses it. Owned by one event loop.

    Every call raises `IndexUnavailable` instead of waiting past ``timeout_s``.
    """

    def __init__(
        self,
        url: str,
        fleet: str,
        me: str,
        clock: Callable[[], float],
        *,
        timeout_s: float = 1.0,
    ) -> None:
        self._redis = RedisFunctions(url, fleet, "registry", timeout_s=timeout_s)
        self._key = self._redis.prefix + b"router_loads"
        self._me = me.encode()
        self._clock = clock
        self._beat = 0
        self._seen: dict[bytes, _Seen] = {}

    async def exchange(self, mine: Mapping[str, SharedLoad]) -> list[Mapping[str, SharedLoad]]:
        """Write what this router has in flight; gives what every other living one has."""
        self._beat += 1
        record = msgspec.msgpack.encode(_Record(self._beat, dict(mine)))
        _, reply = await self._redis.commands(
            [("HSET", self._key, self._me, record), ("HGETALL", self._key)]
        )
        if not isinstance(reply, list) or len(reply) % 2 or len(reply) > 2 * MAX_ROUTERS:
            raise IndexUnavailable(f"router loads: got {reply!r:.80}, expected routers and records")
        records = dict(zip(reply[::2], reply[1::2], strict=True))
        others = [loads for name, data in records.items() if (loads := self._living(name, data))]
        await self._sweep(records)
        return others

    async def leave(self) -> None:
        """This router has nothing in flight any more."""
        await self._redis.command("HDEL", self._key, self._me)

    async def close(self) -> None:
        """Give back connections. What was written expires by itself."""
        await self._redis.close()

    def _living(self, name: bytes, data: bytes) -> Mapping[str, SharedLoad] | None:
        """The loads of another router whose beat moves; a record that is none stands still."""
        try:
            record = msgspec.msgpack.decode(data, type=_Record)
        except (msgspec.MsgspecError, UnicodeDecodeError):
            record = _Record(0, {})
        now, seen = self._clock(), self._seen.get(name)
        if seen is None or seen.beat != record.beat:
            self._seen[name] = seen = _Seen(record.beat, now)
        living = name != self._me and now - seen.since_s < EXPIRY_S
        return record.loads if living else None

    async def _sweep(self, records: Mapping[bytes, bytes]) -> None:
        for name in self._seen.keys() - records.keys():
            del self._seen[name]
        old_s = self._clock() - SWEEP_S
        for name in [name for name, seen in self._seen.items() if seen.since_s < old_s]:
            await self._redis.command("HDEL", self._key, name)
