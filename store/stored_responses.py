"""Which worker keeps which stored response, in Redis, so that every router of a fleet finds it.

Kept beside the registry. A response goes by a name that routers derive from its id and its tenant:
who reads Redis learns neither. Names end after a while, and the oldest first when there are too
many: an engine that keeps responses in its memory keeps them no longer than it runs.
"""

from collections.abc import Mapping

from prefixfleet.store.errors import IndexUnavailable
from prefixfleet.store.redis_functions import Argument, RedisFunctions

MOST_RESPONSES = 100_000
RESPONSE_TTL_S = 86_400.0
"""A conversation that goes on the next day is found; OpenAI keeps responses for 30 days."""


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

    async def note(self, workers: Mapping[bytes, str]) -> None:
        """Each response is kept by its worker from now on."""
        words: list[Argument] = [word for entry in workers.items() for word in entry]
        await self._redis.call("note_responses", self._ttl_s, self._most, *words)

    async def worker_of(self, response: bytes) -> str:
        """Who keeps it; empty if nobody, as far as is known."""
        reply = await self._redis.ask("response_worker", response)
        try:
            return reply.decode()  # type: ignore[no-any-return]  # it is checked by this
        except (AttributeError, UnicodeDecodeError):
            raise IndexUnavailable(
                f"stored responses: got {reply!r:.80}, expected a worker"
            ) from None

    async def close(self) -> None:
        """Give back connections. What was noted ends by itself."""
        await self._redis.close()
