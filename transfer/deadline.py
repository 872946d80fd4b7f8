"""Absolute deadlines as a context: whatever is inside ends by then, or `DeadlineExceeded`."""

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from prefixfleet.store.errors import DeadlineExceeded
from prefixfleet.transfer.link import Deadline


@asynccontextmanager
async def until(deadline: Deadline, what: str) -> AsyncIterator[None]:
    """Cancel the body at ``deadline``. Raises `DeadlineExceeded`, which names ``what``."""
    try:
        async with asyncio.timeout(max(0.0, deadline - time.monotonic())):
            yield
    except TimeoutError:
        raise DeadlineExceeded(f"{what}: not done by its deadline") from None
