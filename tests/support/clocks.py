"""A clock that tests move by hand."""

import asyncio


class ManualClock:
    """Monotonic seconds that pass only by `advance`."""

    def __init__(self, now_s: float = 1000.0) -> None:
        self.now_s = now_s

    def __call__(self) -> float:
        return self.now_s

    def advance(self, seconds: float) -> None:
        self.now_s += seconds


def let_pass(seconds: float) -> None:
    """The running loop's clock jumps, for good: what waits there so long at most is late now."""
    loop = asyncio.get_running_loop()
    now = loop.time
    loop.time = lambda: now() + seconds  # type: ignore[method-assign]
