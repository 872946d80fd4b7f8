"""Blocks that nodes will hold soon, because a prompt was sent there: known here before the index.

One table for all nodes, so that a question costs the same however many there are: which nodes
are assumed to hold a block is one integer, a bit a node. An entry lives for one to two
`ASSUMED_S`: two generations, of which the older one is thrown away as a whole.
"""

from collections.abc import Callable, Mapping, Sequence

from prefixfleet.store.chain import BlockHash
from prefixfleet.store.index import FIELD_BYTES

ASSUMED_S = 4.0
"""How long a prompt just routed counts as held, at least; at most twice that. Longer than a
prefill and the publishing after it, so that siblings of a burst follow the first one."""

MAX_ASSUMED_BLOCKS = 2_000_000
"""Bound on the blocks of a generation, of all nodes: 200 MB. What is beyond is not assumed."""


class Assumed:
    """Owned by one `View`. ``clock`` is monotonic seconds."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._turned_at = clock()
        self._young: dict[bytes, int] = {}
        self._old: dict[bytes, int] = {}
        self._bits: dict[str, int] = {}
        self._names: dict[int, str] = {}
        self._mask = 0  # of the nodes that something may be assumed of
        self._bits_made = 0
        self._free: list[int] = []
        # bits of nodes that were dropped, in each generation that may still have them
        self._retired: tuple[list[int], list[int]] = [], []

    def __len__(self) -> int:
        """Blocks assumed to be somewhere, at most: those in both generations count twice."""
        return len(self._young) + len(self._old)

    def add(self, node: str, chain: Sequence[BlockHash]) -> None:
        """Count ``chain`` as held by ``node`` from now on."""
        self._turn()
        if len(self._young) >= MAX_ASSUMED_BLOCKS:
            return
        bit = self._bits.get(node) or self._new_bit(node)
        young = self._young
        for block in reversed(chain):
            field = block[:FIELD_BYTES]
            held = young.get(field, 0)
            if held & bit:
                return  # and all before it: prompts are assumed whole
            young[field] = held | bit

    def drop(self, node: str) -> None:
        """Assume nothing of ``node`` any more. Its bit stays in the tables until they are gone."""
        if bit := self._bits.pop(node, 0):
            del self._names[bit]
            self._mask ^= bit
            self._retired[0].append(bit)

    def leading(self, chain: Sequence[BlockHash]) -> dict[str, int]:
        """Nodes to the number of leading blocks of ``chain`` that they will hold; no zeros."""
        self._turn()
        young, old = self._young.get, self._old.get
        return leading_of(
            chain, lambda field: young(field, 0) | old(field, 0), self._mask, self._names
        )

    def _turn(self) -> None:
        age = self._clock() - self._turned_at
        if age < ASSUMED_S:
            return
        self._turned_at = self._clock()
        if age >= 2 * ASSUMED_S:
            self._next_generation()
        self._next_generation()

    def _next_generation(self) -> None:
        self._old, self._young = self._young, {}
        self._free += self._retired[1]
        self._retired = [], self._retired[0]

    def _new_bit(self, node: str) -> int:
        if self._free:
            bit = self._free.pop()
        else:
            bit = 1 << self._bits_made
            self._bits_made += 1
        self._bits[node], self._names[bit] = bit, node
        self._mask |= bit
        return bit


def leading_of(
    chain: Sequence[BlockHash],
    holders: Callable[[bytes], int],
    mask: int,
    names: Mapping[int, str],
) -> dict[str, int]:
    """Nodes to the number of leading blocks of ``chain`` that they hold; no zeros.

    ``holders`` of a block's field is a bitmap; of its bits those in ``mask`` count, and ``names``
    says whose they are. By divide and conquer: a node that holds a block holds all before it
    (eviction is leaf first, prompts are assumed whole), so the nodes that hold block i are among
    those that hold block i - 1. From the end in growing steps, since most prompts are new there
    only: about log2(blocks) probes for each different length at most, a microsecond each.
    """
    found: dict[str, int] = {}
    spans = [(0, len(chain), mask)] if mask else []
    while spans:
        low, high, nodes = spans.pop()  # every one of `nodes` holds the blocks before `low`
        step = 1
        while low < high:
            middle = max((low + high) // 2, high - step)
            here = nodes & holders(chain[middle][:FIELD_BYTES])
            if here == nodes:
                low = middle + 1
                continue
            if here:
                spans.append((middle + 1, high, here))
                nodes ^= here
            high = middle
            step *= 4
        for bit in bits_of(nodes) if low else ():
            found[names[bit]] = max(low, found.get(names[bit], 0))
    return found


def bits_of(bitmap: int) -> list[int]:
    """The bits that are set, each as a bitmap."""
    bits = []
    while bitmap:
        bits.append(bitmap & -bitmap)
        bitmap &= bitmap - 1
    return bits
