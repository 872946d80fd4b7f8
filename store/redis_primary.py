"""Where a fleet's Redis is when that may change: behind Sentinel, or on a shard of Redis Cluster.

All keys of a fleet carry its name as the hash tag, so a fleet lives on one shard, and both cases
are one: a primary that is asked for at every connection. Must not know what is stored there.
"""

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any
from urllib.parse import parse_qsl, quote, urlencode, urlsplit

from redis.asyncio import Connection, Redis, SSLConnection
from redis.crc import key_slot
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import RedisError, ResponseError

SENTINEL_PORT, REDIS_PORT = 26379, 6379
SENTINEL, CLUSTER = "sentinel", "cluster"
EXPECTED = (
    "redis+sentinel://[[user]:password@]host[:port],host[:port]/[db]?master=NAME, or "
    "redis+cluster://[[user]:password@]host[:port],host[:port] (rediss+... for TLS)"
)

Address = tuple[str, int]


class NoSuchPrimary(RedisError):
    """Whoever was asked answers, and knows no such primary: a setting is wrong."""


@dataclass(frozen=True, slots=True)
class Seeds:
    """A URL of several servers, taken apart. ``plain`` is the URL of one server with all options,
    whose address stands for the primary's; ``ask`` are URLs of those that know it."""

    kind: str
    plain: str
    ask: tuple[str, ...]
    names: tuple[str, ...]
    master: str

    @classmethod
    def of(cls, url: str) -> "Seeds | None":
        """None for the URL of one server. Raises `ValueError` without the URL in its text."""
        parts = urlsplit(url)
        scheme, _, kind = parts.scheme.partition("+")
        if not kind:
            return None
        if scheme not in ("redis", "rediss") or kind not in (SENTINEL, CLUSTER):
            raise ValueError("unknown scheme")
        options = dict(parse_qsl(parts.query, strict_parsing=bool(parts.query)))
        user, at, hosts = parts.netloc.rpartition("@")
        addresses = [_address(host, kind) for host in hosts.split(",")]
        master = options.pop("master", "")
        if (kind == SENTINEL) != bool(master) or (kind == CLUSTER and parts.path.strip("/0")):
            raise ValueError("master or database")
        own = [options.pop(f"sentinel_{name}", "") for name in ("username", "password")]
        if kind == SENTINEL:
            user_of_seed = f"{quote(own[0], safe='')}:{quote(own[1], safe='')}@" if own[1] else ""
        else:
            user_of_seed = user + at
        query = f"?{urlencode(options)}" if options else ""
        return cls(
            kind=kind,
            plain=f"{scheme}://{user}{at}{kind}{parts.path}{query}",
            ask=tuple(f"{scheme}://{user_of_seed}{h}:{p}{query}" for h, p in addresses),
            names=tuple(f"{host}:{port}" for host, port in addresses),
            master=master,
        )


class Primary:
    """Finds the primary of one fleet. Owned by one event loop.

    ``moves`` counts how often it was another one than before: what was said to the old one may be
    unknown to the new one.
    """

    def __init__(self, seeds: Seeds, key: bytes, timeout_s: float) -> None:
        self._seeds = list(zip(seeds.ask, seeds.names, strict=True))
        self._slot = key_slot(key)
        self._master = seeds.master
        self._find = self._of_sentinel if seeds.kind == SENTINEL else self._of_cluster
        # so that one that is silent leaves time to ask the others and the primary
        self._timeout_s = timeout_s / (len(self._seeds) + 1)
        self._last: Address | None = None
        self.moves = 0
        self.name = f"{seeds.kind} {','.join(seeds.names)}"

    async def find(self) -> Address:
        """Its address now.

        Raises:
            NoSuchPrimary: nobody knows one by that name, or the servers are no cluster.
            redis.exceptions.ConnectionError: nobody who could tell answers.
        """
        why = ""
        for url, name in tuple(self._seeds):
            try:
                async with asyncio.timeout(self._timeout_s):
                    found = await self._find(url, name)
            except NoSuchPrimary:
                raise
            except (RedisError, OSError, TimeoutError) as error:
                why = f"{name}: {type(error).__name__}: {error}".strip(": ")
                self._seeds.append(self._seeds.pop(0))  # another one is asked first next time
                continue
            self.moves += self._last not in (None, found)
            self._last = found
            return found
        raise RedisConnectionError(f"nobody says where the primary is ({why})")

    async def _of_sentinel(self, url: str, name: str) -> Address:
        reply = await _ask(url, "SENTINEL", "GET-MASTER-ADDR-BY-NAME", self._master)
        if reply is None:
            raise NoSuchPrimary(f"Sentinel at {name} knows no master {self._master!r}")
        host, port = reply
        return host.decode(), int(port)

    async def _of_cluster(self, url: str, name: str) -> Address:
        try:
            reply = await _ask(url, "CLUSTER", "SLOTS")
        except ResponseError as error:
            if "cluster support disabled" in str(error):
                raise NoSuchPrimary(f"Redis at {name} is not part of a cluster") from error
            raise
        for first, last, (host, port, *_), *_ in reply:
            if first <= self._slot <= last:
                return (host.decode() if host else name.rpartition(":")[0]), int(port)
        raise NoSuchPrimary(f"the cluster at {name} has nobody for slot {self._slot}")


class _Following:
    """A connection that goes to wherever ``locate`` says at its start."""

    def __init__(self, *, locate: Callable[[], Awaitable[Address]], **options: object) -> None:
        super().__init__(**options)
        self._locate = locate

    async def _connect(self) -> None:
        self.host, self.port = await self._locate()
        await super()._connect()  # type: ignore[misc]


class FollowingConnection(_Following, Connection):
    """Without TLS."""


class FollowingTls(_Following, SSLConnection):
    """With TLS; the name that is checked is the one that Sentinel or the cluster gives."""


async def _ask(url: str, *words: str) -> Any:  # noqa: ANN401 - checked by who asked
    client: Redis = Redis.from_url(url, protocol=2)
    client.response_callbacks.clear()
    try:
        return await client.execute_command(*words)  # type: ignore[no-untyped-call]
    finally:
        await client.aclose()


def _address(text: str, kind: str) -> Address:
    parts = urlsplit(f"//{text}")
    if not parts.hostname:
        raise ValueError("no host")
    default = SENTINEL_PORT if kind == SENTINEL else REDIS_PORT
    host = f"[{parts.hostname}]" if ":" in parts.hostname else parts.hostname
    return host, parts.port or default
