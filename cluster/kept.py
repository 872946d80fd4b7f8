"""Children of a supervisor that are started again when they end: the router, the embedded Redis.

Their ends are logged, and the pauses between starts bound how often. Must not know what they are.
"""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable

from prefixfleet.store.errors import ConfigError

FIRST_PAUSE_S, LAST_PAUSE_S = 0.5, 15.0
STEADY_S = 60.0
"""One that ran for so long is started again without the pauses of earlier ends."""

log = logging.getLogger(__name__)


async def keep(
    name: str,
    ended: Callable[[], Awaitable[str]],
    start: Callable[[], Awaitable[None]],
) -> None:
    """Until cancelled: wait for ``ended``, whose text says how it ended, and ``start`` again.

    A start that raises `ConfigError` is tried again as well.
    """
    pause_s, why = FIRST_PAUSE_S, ""
    while True:
        began = time.monotonic()
        why = why or await ended()
        if time.monotonic() - began > STEADY_S:
            pause_s = FIRST_PAUSE_S
        log.error("%s ended (%s); again in %g s", name, why, pause_s)
        await asyncio.sleep(pause_s)
        pause_s = min(2 * pause_s, LAST_PAUSE_S)
        try:
            await start()
            why = ""
        except ConfigError as error:
            why = str(error)
