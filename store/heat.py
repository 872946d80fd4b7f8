"""Which prefix is hot: asked for on many nodes within a window. Pure; the clock is an argument."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from prefixfleet.store.chain import BlockHash

WINDOW_S = 10.0
"""Questions older than this do not count; a prefix gets hot at most once in it."""
HOT_NODES = 3
"""Different nodes that ask for a prefix within the window make it hot."""
MAX_PREFIXES = 1024
"""Prefixes watched at once; the one asked for longest ago goes first."""


@dataclass(slots=True)
class _Prefix:
    asked_at: dict[str, float] = field(default_factory=dict)  # by node
    hot_at: float = float("-inf")


class Heat:
    """Who asked a source for which prefix. Owned by the source's event loop.

    A prefix goes by its last block: nodes ask for the same one when their prompts share it.
    """

    def __init__(
        self, *, window_s: float = WINDOW_S, nodes: int = HOT_NODES, limit: int = MAX_PREFIXES
    ) -> None:
        self._window_s = window_s
        self._nodes = nodes
        self._limit = limit
        self._prefixes: dict[BlockHash, _Prefix] = {}  # asked for longest ago first

    def __len__(self) -> int:
        return len(self._prefixes)

    def asked(self, node: str, chain: Sequence[BlockHash], now: float) -> frozenset[str]:
        """``node`` asks for ``chain``. The nodes that asked for it within the window if that
        makes it hot now, else nobody."""
        prefix = self._prefixes.pop(chain[-1], None) or _Prefix()
        self._prefixes[chain[-1]] = prefix
        while len(self._prefixes) > self._limit:
            del self._prefixes[next(iter(self._prefixes))]
        since = now - self._window_s
        prefix.asked_at[node] = now
        prefix.asked_at = {name: at for name, at in prefix.asked_at.items() if at > since}
        if len(prefix.asked_at) < self._nodes or prefix.hot_at > since:
            return frozenset()
        prefix.hot_at = now
        return frozenset(prefix.asked_at)
