"""Which router of a fleet polls an engine that tells its events only once.

Of several pollers each would hear a part. One holds the right, and keeps it by coming back in
time; when it is gone another one takes over. Kept beside the registry, in Redis.
"""

from prefixfleet.store.errors import IndexUnavailable
from prefixfleet.store.redis_functions import RedisFunctions

RIGHT_S = 10.0
"""How long the right is kept for a router that does not come back."""


class PollRights:
    """The rights of one fleet, as router ``me`` sees them. Owned by one event loop."""

    def __init__(self, url: str, fleet: str, me: str, *, timeout_s: float = 1.0) -> None:
        self._functions = RedisFunctions(url, fleet, "registry", timeout_s=timeout_s)
        self._me = me

    async def claim(self, engine: str, *, ttl_s: float = RIGHT_S) -> bool:
        """Whether this router may poll ``engine`` for the next ``ttl_s``.

        Raises:
            IndexUnavailable: nobody can say.
        """
        holder = await self._functions.call("claim_poll", engine, self._me, ttl_s)
        if not isinstance(holder, bytes):
            raise IndexUnavailable(f"claim_poll: got {holder!r:.80}, expected a router")
        return holder == self._me.encode()

    async def close(self) -> None:
        """Give back connections. A right ends by itself."""
        await self._functions.close()
