"""Which prefixes are asked for most, as a tree of hashes. No text, no tokens: counts only.

A chain is looked at where its length doubles (blocks 1, 2, 4, ...), so that a prompt of 1,000
blocks is ten entries. What is old fades; the number of entries is bounded, and the one that nobody
asked for longest goes first.
"""

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from prefixfleet.store.chain import BlockHash

MAX_ENTRIES = 4_096
HALF_LIFE_S = 300.0
MAX_SHOWN = 40
SHOWN_CHARACTERS = 12


@dataclass(slots=True)
class _Entry:
    parent: BlockHash
    tokens: int
    heat: float
    at_s: float
    requests: int = 0

    def cool(self, now: float) -> float:
        """Requests of late: each counts half after `HALF_LIFE_S`."""
        return float(self.heat * 0.5 ** ((now - self.at_s) / HALF_LIFE_S))


class HotPrefixes:
    """Owned by one router's `Activity`."""

    def __init__(self) -> None:
        self._entries: OrderedDict[BlockHash, _Entry] = OrderedDict()

    def note(self, chain: Sequence[BlockHash], block_tokens: int, now: float) -> None:
        """A request with this prefix was sent."""
        parent, path, length = b"", [], 1
        while length <= len(chain):
            block = chain[length - 1]
            entry = self._entries.setdefault(
                block, _Entry(parent, length * block_tokens, heat=0.0, at_s=now)
            )
            entry.heat, entry.at_s = entry.cool(now) + 1, now
            entry.requests += 1
            path.append(block)
            parent, length = block, 2 * length
        for block in reversed(path):  # children grow old before their parents
            self._entries.move_to_end(block)
        while len(self._entries) > MAX_ENTRIES:
            self._entries.popitem(last=False)

    def tree(self, now: float) -> list[dict[str, Any]]:
        """The hottest prefixes that more than one request had, those that continue one inside it.

        An entry is ``{"prefix", "tokens", "requests", "heat", "children"}``.
        """
        shared = [(e.cool(now), b) for b, e in self._entries.items() if e.requests > 1]
        hottest = {block: heat for heat, block in sorted(shared, reverse=True)[:MAX_SHOWN]}
        made = {block: self._shown(block, heat) for block, heat in hottest.items()}
        roots: list[dict[str, Any]] = []
        for block in made:
            above = self._entries[block].parent
            (made[above]["children"] if above in made else roots).append(made[block])
        return [_joined(root) for root in roots]

    def _shown(self, block: BlockHash, heat: float) -> dict[str, Any]:
        entry = self._entries[block]
        return {
            "prefix": block.hex()[:SHOWN_CHARACTERS],
            "tokens": entry.tokens,
            "requests": entry.requests,
            "heat": round(heat, 2),
            "children": [],
        }


def _joined(shown: dict[str, Any]) -> dict[str, Any]:
    """A prefix that is only ever continued in one way is shown by its longest form."""
    while len(shown["children"]) == 1 and shown["children"][0]["requests"] == shown["requests"]:
        shown = shown["children"][0]
    return {**shown, "children": [_joined(child) for child in shown["children"]]}
