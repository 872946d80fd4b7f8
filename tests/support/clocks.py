"""A clock that tests move by hand."""


class ManualClock:
    """Monotonic seconds that pass only by `advance`."""

    def __init__(self, now_s: float = 1000.0) -> None:
        self.now_s = now_s

    def __call__(self) -> float:
        return self.now_s

    def advance(self, seconds: float) -> None:
        self.now_s += seconds
