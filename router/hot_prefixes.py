"""Which prefixes are asked for most, as a tree of hashes. No text, no tokens: counts only.

A chain is looked at where its length doubles (blocks 1, 2, 4, ...), so that a prompt of 1,000
blocks is ten entries. What is old fades; the number of entries is bounded, and of those that
nothing continues the one that nobody asked for longest goes first.
"""

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from prefixfleet.store.chain import BlockHash

MAX_ENTRIES = 4_096
HALF_LIFE_S = 300.0
MAX_HALF_LIVES = 500.0  # then weights start again from 1, or they would be too big for a float
MAX_SHOWN = 40
SHOWN_CHARACTERS = 12


@dataclass(slots=True)
class _Entry:
    """What is counted here is not counted in its parent: the tree is summed up when it is shown."""

    parent: BlockHash
    tokens: int
    heat: float = 0.0  # requests, each by the weight that a request had at its time
    requests: int = 0
    children: int = 0


class HotPrefixes:
    """Owned by one router's `Activity`."""

    def __init__(self) -> None:
        self._entries: OrderedDict[BlockHash, _Entry] = OrderedDict()
        self._start_s: float | None = None

    def note(self, chain: Sequence[BlockHash], block_tokens: int, now: float) -> None:
        """A request with this prefix was sent."""
        if not chain:
            return
        last = chain[(1 << (len(chain).bit_length() - 1)) - 1]
        entry = self._entries.get(last) or self._added(chain, block_tokens)
        entry.heat += self._weight(now)
        entry.requests += 1
        self._entries.move_to_end(last)
        while len(self._entries) > MAX_ENTRIES:
            self._forget_oldest()

    def _added(self, chain: Sequence[BlockHash], block_tokens: int) -> _Entry:
        """The last entry of ``chain``, new as those before it may be."""
        parent, before, length = b"", None, 1
        while length <= len(chain):
            block = chain[length - 1]
            entry = self._entries.get(block)
            if entry is None:
                entry = self._entries[block] = _Entry(parent, length * block_tokens)
                if before is not None:
                    before.children += 1
            parent, before, length = block, entry, 2 * length
        assert before is not None
        return before

    def _forget_oldest(self) -> None:
        """Leaves only: what was counted in them stays counted in their parents."""
        block, entry = self._entries.popitem(last=False)
        if entry.children:
            self._entries[block] = entry
        elif parent := self._entries.get(entry.parent):
            parent.children -= 1
            parent.heat += entry.heat
            parent.requests += entry.requests

    def _weight(self, now: float) -> float:
        """What a request counts now: twice as much every `HALF_LIFE_S`, so that nothing need be
        cooled where it stands."""
        if self._start_s is None:
            self._start_s = now
        half_lives = (now - self._start_s) / HALF_LIFE_S
        if half_lives > MAX_HALF_LIVES:
            for entry in self._entries.values():
                entry.heat *= 0.5**half_lives
            self._start_s, half_lives = now, 0.0
        return float(2.0**half_lives)

    def tree(self, now: float) -> list[dict[str, Any]]:
        """The hottest prefixes that more than one request had, those that continue one inside it.

        An entry is ``{"prefix", "tokens", "requests", "heat", "children"}``.
        """
        weight = self._weight(now)
        totals = self._totals()
        shared = [(heat / weight, b) for b, (requests, heat) in totals.items() if requests > 1]
        hottest = sorted(shared, reverse=True)[:MAX_SHOWN]
        made = {block: self._shown(block, heat, totals[block][0]) for heat, block in hottest}
        roots: list[dict[str, Any]] = []
        for block in made:
            above = self._entries[block].parent
            (made[above]["children"] if above in made else roots).append(made[block])
        return [_joined(root) for root in roots]

    def _totals(self) -> dict[BlockHash, tuple[int, float]]:
        """Requests and heat of every prefix, with all that continue it."""
        totals = {block: (entry.requests, entry.heat) for block, entry in self._entries.items()}
        for block, entry in sorted(self._entries.items(), key=lambda item: -item[1].tokens):
            if above := totals.get(entry.parent):  # longest first: this one has all it gets
                requests, heat = totals[block]
                totals[entry.parent] = above[0] + requests, above[1] + heat
        return totals

    def _shown(self, block: BlockHash, heat: float, requests: int) -> dict[str, Any]:
        entry = self._entries[block]
        return {
            "prefix": block.hex()[:SHOWN_CHARACTERS],
            "tokens": entry.tokens,
            "requests": requests,
            "heat": round(heat, 2),
            "children": [],
        }


def _joined(shown: dict[str, Any]) -> dict[str, Any]:
    """A prefix that is only ever continued in one way is shown by its longest form."""
    while len(shown["children"]) == 1 and shown["children"][0]["requests"] == shown["requests"]:
        shown = shown["children"][0]
    return {**shown, "children": [_joined(child) for child in shown["children"]]}
