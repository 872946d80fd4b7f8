"""Requests that came in the same turn of the loop go on in step, one stage of their way after the
other: the same code on one after the other finds itself and its data in the processor's caches.
"""

import types
from collections.abc import Generator


@types.coroutine
def in_step() -> Generator[None, None, None]:
    """Go on when all requests that came with this one have come as far: a turn of the loop."""
    yield
