"""A loop of the router never ends unseen: a fault of ours in it is told, and it begins anew."""

import asyncio
import logging
from collections.abc import Awaitable, Callable

from prefixfleet.router.degraded import Degraded

AGAIN_S = 1.0

log = logging.getLogger(__name__)


async def kept_running(
    name: str, run: Callable[[], Awaitable[None]], degraded: Degraded, again_s: float = AGAIN_S
) -> None:
    """Await ``run()`` until cancelled, and again ``again_s`` after it failed.

    The degraded mode stays to the end of the process: a fault that came once comes again.
    """
    while True:
        try:
            await run()
        except Exception as error:  # whatever it is, requests are served on, and somebody is told
            log.exception("the loop %r failed: a fault of the router", name)
            degraded.enter(
                f"loop {name}",
                f"it failed and began anew ({type(error).__name__})",
                "a fault of the router: report what its log says, then start it again",
            )
        await asyncio.sleep(again_s)
