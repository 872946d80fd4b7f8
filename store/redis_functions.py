"""One Lua library on a Redis server, called by name: connection, loading, deadlines, errors.

The library's source lies beside this file. Its name on the server carries a digest of the source,
so that two versions of prefixfleet work on one server side by side.
"""

import asyncio
import hashlib
import re
from collections.abc import Awaitable, Iterable, Sequence
from functools import cache
from pathlib import Path
from typing import Any, TypeAlias

from redis.asyncio import BlockingConnectionPool, Redis, SSLConnection
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import (
    AskError,
    AuthenticationError,
    AuthorizationError,
    ClusterDownError,
    MasterDownError,
    MovedError,
    NoPermissionError,
    ReadOnlyError,
    RedisError,
    ResponseError,
)

from prefixfleet.store.errors import ConfigError, Fenced, FleetError, IndexUnavailable
from prefixfleet.store.redis_primary import (
    EXPECTED,
    FollowingConnection,
    FollowingTls,
    NoSuchPrimary,
    Primary,
    Seeds,
)

SCHEMA_VERSION = 1
"""Part of every key; a library that reads keys another way needs another one."""
MIN_SERVER_MAJOR = 7
MAX_CONNECTIONS = 16
_NOT_HERE = (AskError, ClusterDownError, MasterDownError, MovedError, ReadOnlyError)
"""What a server says that was the fleet's primary and is it no more, or not yet."""

Argument: TypeAlias = bytes | str | int | float
Reply: TypeAlias = Any
"""Whatever a server sent: bytes, int, None or a list of these. Whoever asked checks it."""


class RedisFunctions:
    """Functions of one library for one fleet. Owned by one event loop.

    The library is the text of ``files`` (X for X.lua), one after the other, and is called after
    the last of them.

    ``area`` sets its keys apart from those of the same library for another use. ``url`` is
    redis://, rediss:// or unix://, or names Sentinels or a cluster (`redis_primary`); what it
    holds besides the address appears in no message. No call waits more than ``timeout_s``.

    Raises:
        ConfigError: the URL is none of these.
    """

    def __init__(
        self, url: str, fleet: str, *files: str, area: str = "", timeout_s: float = 1.0
    ) -> None:
        self.prefix = f"pf{SCHEMA_VERSION}:{{{fleet}}}:{area and area + ':'}".encode()
        self.timeout_s = timeout_s
        self._files = files
        self._primary: Primary | None = None
        self.redis = self._client(url)
        self.server = self._primary.name if self._primary else _address(self.redis)

    @property
    def moves(self) -> int:
        """How often another server became the fleet's primary; 0 for ever with one server."""
        return self._primary.moves if self._primary else 0

    async def prepare(self) -> None:
        """Check the server and load the library; optional, a call does it where it must.

        Raises:
            ConfigError: the server is too old or does not let us in.
            IndexUnavailable: it does not answer.
        """
        try:
            await self._within_limit(self._load())
        except _Refused as error:
            raise ConfigError(f"{error}; set PREFIXFLEET_REDIS_URL") from error

    async def call(self, function: str, *args: Argument) -> Reply:
        """Answer of a function that may write.

        Raises:
            IndexUnavailable: no answer in time, or one that no sound server gives.
            Fenced: the library says so.
        """
        return await self._within_limit(self._call("FCALL", function, args))

    async def ask(self, function: str, *args: Argument) -> Reply:
        """Answer of a function that only reads. Raises `IndexUnavailable`."""
        return await self._within_limit(self._call("FCALL_RO", function, args))

    async def command(self, *args: Argument, timeout_s: float | None = None) -> Reply:
        """Answer of a plain command, as it came. Raises `IndexUnavailable`."""
        return await self._within_limit(self._execute(*args), timeout_s)

    async def commands(self, commands: Iterable[Sequence[Argument]]) -> list[Reply]:
        """Answers of plain commands, sent together. Raises `IndexUnavailable`."""
        pipeline = self.redis.pipeline(transaction=False)
        for words in commands:
            pipeline.execute_command(*words)
        replies: list[Reply] = await self._within_limit(pipeline.execute())
        return replies

    async def close(self) -> None:
        """Give the connections back."""
        await self.redis.aclose()

    def _client(self, url: str) -> Redis:
        try:
            seeds = Seeds.of(url)
            pool = BlockingConnectionPool.from_url(
                seeds.plain if seeds else url,
                protocol=2,
                max_connections=MAX_CONNECTIONS,
                timeout=self.timeout_s,
                retry=Retry(NoBackoff(), 0),  # a change is never sent twice behind our back
            )
            if seeds:
                self._primary = Primary(seeds, self.prefix, self.timeout_s)
                tls = issubclass(pool.connection_class, SSLConnection)
                pool.connection_class = FollowingTls if tls else FollowingConnection
                pool.connection_kwargs["locate"] = self._primary.find
            pool.connection_class(**pool.connection_kwargs)  # unknown options in the URL
        except (ValueError, TypeError):
            # without the cause: its text may hold a piece of the password
            raise ConfigError(
                "Redis URL: expected redis://[[user]:password@]host[:port][/db], rediss://..., "
                f"unix://[[user]:password@]/path, {EXPECTED}, special characters percent-encoded; "
                "set PREFIXFLEET_REDIS_URL"
            ) from None
        redis = Redis.from_pool(pool)
        redis.response_callbacks.clear()  # replies as they came: what is in them is checked here
        return redis

    def _execute(self, *words: Argument) -> Awaitable[Reply]:
        return self.redis.execute_command(*words)  # type: ignore[no-untyped-call]

    async def _call(self, command: str, function: str, args: tuple[Argument, ...]) -> Reply:
        library, _ = _library(self._files)
        words = (command, f"{library}_{function}", 1, self.prefix, *args)
        try:
            return await self._execute(*words)
        except ResponseError as error:
            if "function not found" not in str(error).lower():
                raise
        await self._load()
        return await self._execute(*words)

    async def _load(self) -> None:
        major = _major(await self._execute("INFO", "server"))
        if major < MIN_SERVER_MAJOR:
            raise _Refused(
                f"Redis at {self.server}: got version {major}, expected Redis {MIN_SERVER_MAJOR} "
                "or Valkey or newer, for its functions"
            )
        try:
            await self._execute("FUNCTION", "LOAD", _library(self._files)[1])
        except ResponseError as error:
            if "already exists" not in str(error):
                raise

    async def _within_limit(self, work: Awaitable[Reply], timeout_s: float | None = None) -> Reply:
        limit_s = self.timeout_s if timeout_s is None else timeout_s
        task = asyncio.current_task()
        cancelled = task.cancelling() if task else 0
        try:
            async with asyncio.timeout(limit_s):
                return await work
        except (RedisError, OSError, ValueError) as error:
            if self._primary and isinstance(error, _NOT_HERE):
                await self.redis.connection_pool.disconnect()  # the next call asks where it is
            raise self._explain(error, limit_s) from error
        finally:
            if task and task.cancelling() > cancelled:
                raise asyncio.CancelledError  # redis-py loses one that comes while it connects

    def _explain(self, error: Exception, limit_s: float) -> FleetError:
        where = f"Redis at {self.server}"
        if isinstance(error.__cause__, NoSuchPrimary):  # redis-py wraps what connecting raises
            return _Refused(str(error.__cause__))
        if isinstance(error, AuthenticationError | AuthorizationError | NoPermissionError):
            return _Refused(f"{where} refused us: {error}")
        if isinstance(error, ResponseError):
            fenced = str(error).startswith("FENCED")
            return Fenced(str(error)) if fenced else IndexUnavailable(f"{where}: {error}")
        if isinstance(error, TimeoutError):
            return IndexUnavailable(f"{where}: no answer within {limit_s} s")
        return IndexUnavailable(f"{where}: {type(error).__name__}: {error}")


class _Refused(IndexUnavailable):
    """The server answers, and will not serve us until somebody changes a setting."""


def _address(redis: Redis) -> str:
    known = redis.connection_pool.connection_kwargs
    if path := known.get("path"):
        return str(path)
    return f"{known.get('host', 'localhost')}:{known.get('port', 6379)}/{known.get('db', 0)}"


def _major(info: object) -> int:
    text = info if isinstance(info, bytes) else b""
    found = re.search(rb"^redis_version:(\d+)\.", text, re.MULTILINE)
    if found is None:
        raise ValueError(f"INFO: got {info!r:.80}, expected a redis_version")
    return int(found[1])


@cache
def _library(files: tuple[str, ...]) -> tuple[str, str]:
    """Name on the server, and code to load."""
    paths = [Path(__file__).parent / f"{file}.lua" for file in files]
    source = "\n".join(path.read_text(encoding="utf-8") for path in paths)
    digest = hashlib.sha256(source.encode()).hexdigest()[:12]
    library = f"prefixfleet_{files[-1]}_{digest}"
    return library, f"#!lua name={library}\nlocal LIBRARY = '{library}'\n{source}"
