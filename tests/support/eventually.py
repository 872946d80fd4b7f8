"""Waiting for what another process does: bounded polling of a condition, where no event exists."""

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any


async def until(condition: Callable[[], Any], timeout_s: float = 30.0) -> Any:
    """The first true value of ``condition()``, which may be a coroutine function."""
    async with asyncio.timeout(timeout_s):
        while True:
            value = condition()
            if asyncio.iscoroutine(value):
                value = await value
            if value:
                return value
            await asyncio.sleep(0.01)


def alive(pid: int) -> bool:
    """Whether the process runs (a zombie does not)."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return False
    return stat.rsplit(")", 1)[1].split()[0] != "Z"
