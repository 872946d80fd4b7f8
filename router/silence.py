"""Workers that take requests and compute nothing get no more of them while there are others.

An engine whose process answers and whose GPU hangs is never busy by the estimates: what it should
compute should be done by now. So it would draw every request that finds the others at work.
"""

import asyncio
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from prefixfleet.router.core import Router

LOOK_S = 0.5


async def watch_silence(router: "Router") -> None:
    """Shun who is silent until it says a word, or nobody waits for one any more."""
    shunned: frozenset[str] = frozenset()
    while True:
        silent = router.book.silent()
        for name in shunned - silent.keys():
            router.degraded.end(f"silence of {name}")
        for name in silent.keys() - shunned:
            router.degraded.enter(
                f"silence of {name}",
                f"worker {name} has computed nothing of its requests for {silent[name]:.0f} s; "
                "new ones go to others",
                "look at its engine: it answers connections, but no prompt",
            )
        router.eligible.shunned = shunned = frozenset(silent)
        await asyncio.sleep(LOOK_S)
