"""Block ids of a trace, each for a block and everything before it, and how much of them is kept."""

from collections.abc import Iterable

MAX_IDS = 100_000_000
"""Of all requests together: 8 bytes each."""
MAX_DIFFERENT = 16_000_000
"""About 150 bytes each."""
FIRST_OWN = 1 << 63
"""A trace's own ids are below; above are those given to a block that comes behind two others."""


class PrefixIds:
    """Mooncake's ids stand for prefixes already. Qwen-Bailian's are digests of a block's content:
    the same block behind another one gets an id of its own here, or prompts would seem to share
    what they do not. Owned by who reads the trace."""

    def __init__(self) -> None:
        self._first: dict[int, tuple[int, int]] = {}  # an id, itself and what came before it first
        self._others: dict[tuple[int, int], int] = {}  # behind something else: by both
        self._read = 0

    def of(self, ids: Iterable[int]) -> tuple[int, ...]:
        """The ids of one request, from its first block. Raises `ValueError` if that is too much
        to keep."""
        before, found = -1, []
        for block in ids:
            same, parent = self._first.setdefault(block, (block, before))
            if parent != before:
                fresh = FIRST_OWN + len(self._others)
                same = self._others.setdefault((before, block), fresh)
            found.append(same)
            before = same
        self._read += len(found)
        if self._read > MAX_IDS or len(self._first) + len(self._others) > MAX_DIFFERENT:
            raise ValueError(
                f"more than {MAX_IDS:,} block ids, or {MAX_DIFFERENT:,} different ones, up to "
                "here; --limit reads the first requests only"
            )
        return tuple(found)
