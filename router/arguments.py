"""Numbers on the command line of replay, simulator, plan and top: what was got, what is expected.
Pure; each function is a type for argparse."""

import argparse
from collections.abc import Callable
from typing import TypeAlias

from prefixfleet.store.replication import Mode

Failure: TypeAlias = tuple[int, float, float]
"""A node's number, the second at which it fails, and for how many it is away: 0, it restarts."""

LEAST, MOST = 1e-9, 1e12
"""Outside of these, sums and quotients of what users state stop being numbers."""
MAX_NODES = 10_000
MAX_TOKENS = 10**15
MAX_REQUESTS = 10**9


def positive(text: str) -> float:
    """A number above zero."""
    return amount(LEAST, MOST)(text)


def amount(least: float, most: float) -> Callable[[str], float]:
    """Numbers from ``least`` to ``most``."""

    def read(text: str) -> float:
        try:
            value = float(text)
        except ValueError:
            value = float("nan")
        if not least <= value <= most:
            raise argparse.ArgumentTypeError(
                f"got {text:.80}, expected a number from {least:g} to {most:g}"
            )
        return value

    return read


def count(most: int, least: int = 1) -> Callable[[str], int]:
    """Whole numbers from ``least`` to ``most``."""

    def read(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            value = least - 1
        if not least <= value <= most:
            raise argparse.ArgumentTypeError(
                f"got {text:.80}, expected a whole number from {least} to {most}"
            )
        return value

    return read


def failure(text: str) -> Failure:
    """``NODE@SECONDS`` or ``NODE@SECONDS+AWAY``, for argparse."""
    number, at, when = text.partition("@")
    at_s, plus, away_s = when.partition("+")
    if not at:
        raise argparse.ArgumentTypeError(
            f"got {text:.80}, expected NODE@SECONDS or NODE@SECONDS+AWAY, as 2@600 or 2@600+120"
        )
    gone_s = positive(away_s) if plus else 0.0
    return count(MAX_NODES - 1, least=0)(number), positive(at_s), gone_s


def replication_mode(text: str) -> Mode:
    """One of the modes, for argparse."""
    try:
        return Mode(text)
    except ValueError:
        raise argparse.ArgumentTypeError(
            f"got {text:.80}, expected one of {', '.join(Mode)}"
        ) from None
