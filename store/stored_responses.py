"""Which worker keeps which stored response, in Redis, so that every router of a fleet finds it.

Kept beside the registry. A response goes by names that routers derive from its tenant and its id:
who reads Redis learns neither, only how many one has. Names end after a while, and of too many the
oldest of who has most: an engine that keeps responses in its memory keeps them no longer than it
runs.
"""

from collections.abc import Mapping
from typing import NamedTuple

from prefixfleet.store.errors import IndexUnavailable
from prefixfleet.store.redis_functions import Argument, RedisFunctions

MOST_RESPONSES = 100_000
RESPONSE_TTL_S = 86_400.0
"""A conversation that goes on the next day is found; OpenAI keeps responses for 30 days."""


class ResponseName(NamedTuple):
    """A response as Redis and routers know it: both are digests."""

    tenant: bytes
    response: bytes


class StoredResponses:
    """The stored responses of one fleet. Owned by one event loop.

    Every call raises `IndexUnavailable` instead of waiting past ``timeout_s``.
    """

    def __init__(
        self,
        url: str,
        fleet: str,
        *,
        ttl_s: float = RESPONSE_TTL_S,
        most: int = MOST_RESPONSES,
        timeout_s: float = 1.0,
    ) -> None:
        self._redis = RedisFunctions(url, fleet, "registry", timeout_s=timeout_s)
        self._ttl_s = ttl_s
        self._most = most

    async def note(self, workers: Mapping[ResponseName, str]) -> None:
        """Each response is kept by its worker from now on."""
        words: list[Argument] = []
        for name, worker in workers.items():
            words += (name.tenant.hex(), name.response, worker)
        await self._redis.call("note_responses", self._ttl_s, self._most, *words)

    async def worker_of(self, name: ResponseName) -> str:
        """Who keeps it; empty if nobody, as far as is known."""
        reply = await self._redis.ask("response_worker", name.tenant.hex(), name.response)
        try:
            return reply.decode()  # type: ignore[no-any-return]  # it is checked by this
        except (AttributeError, UnicodeDecodeError):
            raise IndexUnavailable(
                f"stored responses: got {reply!r:.80}, expected a worker"
            ) from None

    async def close(self) -> None:
        """Give back connections. What was noted ends by itself."""
        await self._redis.close()
