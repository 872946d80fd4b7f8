"""`in_order`: a few calls under way at once, their results in the order of the calls."""

import asyncio
from collections import deque
from collections.abc import AsyncGenerator, Callable, Coroutine, Iterable
from typing import Any, TypeVar

Item = TypeVar("Item")
Result = TypeVar("Result")


async def in_order(
    call: Callable[[Item], Coroutine[Any, Any, Result]], items: Iterable[Item], ahead: int
) -> AsyncGenerator[Result, None]:
    """Results of ``call`` for each of ``items``, at most ``ahead`` of them under way.

    Raises what a call raised. However it ends, no call is under way any more: they are waited
    for, or cancelled where the caller is. Use it with `contextlib.aclosing`.
    """
    under_way: deque[asyncio.Task[Result]] = deque()
    try:
        for item in items:
            if len(under_way) == ahead:
                yield await under_way.popleft()
            under_way.append(asyncio.create_task(call(item)))
        while under_way:
            yield await under_way.popleft()
    except asyncio.CancelledError:
        for task in under_way:
            task.cancel()
        raise
    finally:
        await asyncio.gather(*under_way, return_exceptions=True)
