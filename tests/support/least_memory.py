"""How little memory a policy needs for a stated part of the hits that are possible."""

from collections.abc import Callable, Mapping, Sequence

TRIED_AT_ONCE = 4
CLOSE_ENOUGH = 1.02


def least_memory(
    hit_rates: Callable[[Sequence[int]], Mapping[int, float]],
    wanted: float,
    *,
    most: int,
    least: int = 1,
) -> int | None:
    """The least blocks a node, within 2 %, with which the hit rate is ``wanted``.

    ``hit_rates`` of some sizes at once; they rise with the size, but for noise. None if ``most``
    blocks are too few; ``least`` are taken to be.
    """
    if hit_rates([most])[most] < wanted:
        return None
    low, high = least, most
    while high > max(low * CLOSE_ENOUGH, low + 1):
        step = (high / low) ** (1 / (TRIED_AT_ONCE + 1))
        sizes = sorted({round(low * step**i) for i in range(1, TRIED_AT_ONCE + 1)} - {low, high})
        if not sizes:
            break
        rates = hit_rates(sizes)
        enough = [size for size in sizes if rates[size] >= wanted]
        high = min(enough, default=high)
        low = max((size for size in sizes if size < high), default=low)
    return high
