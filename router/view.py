"""What this router believes about who holds which block: an in-memory copy of the index.

Fed by `PrefixIndex.snapshot` and `follow`, asked for every request, never over the network. Two
things are known here before the index knows them: blocks of prompts that were just routed
(`assume`), and nodes that failed before our eyes (`suspect`).
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from prefixfleet.router.block_table import BlockTable
from prefixfleet.store.chain import BlockHash
from prefixfleet.store.index import FIELD_BYTES, IndexEvent, Membership, Snapshot

ASSUMED_S = 4.0
"""How long a prompt just routed counts as held, at least; at most twice that. Longer than a
prefill and the publishing after it, so that siblings of a burst follow the first one."""

SUSPECT_S = 5.0
"""How long a node that failed before our eyes matches nothing. Longer than its lease (3 s): if
it is dead, the index has forgotten it by then."""

INHERIT_S = 5.0
"""How long a life of a node is believed after the index lost its memory: until every node has
noticed, joined again and published what it holds."""

LOAD_STEP_BLOCKS = 2_000  # 2 ms between two looks of the event loop at everything else
MAX_ASSUMED_BLOCKS = 200_000
"""Bound on `assume`, a node and generation: 20 MB."""


@dataclass(slots=True)
class _Assumed:
    """Two generations of block fields: an entry lives for one to two `ASSUMED_S`."""

    turned_at: float
    young: set[bytes] = field(default_factory=set)
    old: set[bytes] = field(default_factory=set)

    def turn(self, now: float) -> None:
        age = now - self.turned_at
        if age >= ASSUMED_S:
            self.old = self.young if age < 2 * ASSUMED_S else set()
            self.young = set()
            self.turned_at = now

    def holds(self, block: bytes) -> bool:
        return block in self.young or block in self.old


class View:
    """Owned by the router's event loop; not thread-safe. ``clock`` is monotonic seconds."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._blocks = BlockTable()
        self._members: dict[str, Membership] = {}
        self._bits: dict[Membership, int] = {}  # our own numbers: those of the index may come again
        self._free_bits: list[int] = []
        self._bits_made = 0
        self._names: tuple[Mapping[int, str], int] | None = None  # of `_nodes_of_bits`
        self._inherited: dict[str, tuple[int, float]] = {}  # bit of a former life, and until when
        self._memory_lost_s = float("-inf")
        self._suspects: dict[str, float] = {}
        self._assumed: dict[str, _Assumed] = {}

    def __len__(self) -> int:
        """Blocks that at least one node holds."""
        return len(self._blocks)

    @property
    def members(self) -> Mapping[str, Membership]:
        """Live nodes by name, as the index told us last; suspects included."""
        return self._members

    def load(self, snapshot: Snapshot) -> Iterator[None]:
        """Replace everything that came from the index, a bounded step at each ``next``.

        Until the last step the view answers as before; a big index takes seconds to take in. A
        life that we know and the snapshot does not has not ended: the index has lost its memory,
        and the nodes still have their blocks. It is believed for `INHERIT_S` more, also when its
        node joins anew meanwhile.
        """
        bits = {member: self._new_bit() for member in snapshot.members}
        own = {1 << member.slot: bit for member, bit in bits.items()}
        translated: dict[int, int] = {}
        for number, (block, holders) in enumerate(snapshot.holders.items()):
            if holders not in translated:
                translated[holders] = sum(bit for slot, bit in own.items() if holders & slot)
            self._blocks.add((block,), translated[holders])
            if number % LOAD_STEP_BLOCKS == 0:
                yield
        self._replace(bits)
        yield

    def apply(self, event: IndexEvent) -> None:
        """Follow one change. An event of a life of a node that is not the latest is ignored."""
        member = event.member
        known = self._members.get(member.node)
        if event.kind == "join":
            if known is None or known.epoch < member.epoch:
                self._join(member, known)
        elif known != member:
            return
        elif event.kind == "publish":
            self._blocks.add(_fields(event.hashes), self._bits[member])
        elif event.kind == "withdraw":
            self._blocks.remove(_fields(event.hashes), self._bits[member])
        elif event.kind == "leave":
            self._end(member)
            self._disinherit(member.node)
            self._assumed.pop(member.node, None)

    def forget(self, gone: Iterable[Membership]) -> None:
        """Forget members whose lease ended, whether or not an event says so.

        Not while the index itself has just lost its memory: then it knows nobody's lease.
        """
        for member in gone if self._clock() >= self._memory_lost_s + INHERIT_S else ():
            self.apply(IndexEvent("leave", member))

    def suspect(self, node: str) -> None:
        """A connection to ``node`` failed: match nothing on it until its lease has had time."""
        self._suspects[node] = self._clock() + SUSPECT_S
        self._assumed.pop(node, None)

    def is_suspect(self, node: str) -> bool:
        """Whether ``node`` failed before our eyes a short while ago."""
        until = self._suspects.get(node)
        if until is None:
            return False
        if self._clock() < until:
            return True
        del self._suspects[node]
        return False

    def assume(self, node: str, chain: Sequence[BlockHash]) -> None:
        """Count ``chain`` as held by ``node`` for a short while: a prompt was just sent there."""
        now = self._clock()
        assumed = self._assumed.setdefault(node, _Assumed(now))
        assumed.turn(now)
        if len(assumed.young) < MAX_ASSUMED_BLOCKS:
            assumed.young.update(block[:FIELD_BYTES] for block in chain)

    def leading(self, chain: Sequence[BlockHash]) -> dict[str, int]:
        """Live nodes to the number of leading blocks of ``chain`` that they hold; no zeros.

        By divide and conquer: a node that holds a block holds all before it (eviction is leaf
        first), so the nodes that hold block i are among those that hold block i - 1. About
        log2(blocks) probes for each different length, a microsecond each.
        """
        nodes_of, mask = self._nodes_of_bits()
        found: dict[str, int] = {}
        spans = [(0, len(chain), mask)] if mask else []
        while spans:
            low, high, nodes = spans.pop()  # every one of `nodes` holds the blocks before `low`
            if low == high:
                for bit in bits_of(nodes) if low else ():
                    found[nodes_of[bit]] = max(low, found.get(nodes_of[bit], 0))
                continue
            middle = (low + high) // 2
            here = nodes & self._blocks[chain[middle][:FIELD_BYTES]]
            if here:
                spans.append((middle + 1, high, here))
            if here != nodes:
                spans.append((low, middle, nodes & ~here))
        return found

    def holders(self, block: BlockHash) -> set[str]:
        """The live nodes that hold the block."""
        nodes_of, mask = self._nodes_of_bits()
        return {nodes_of[bit] for bit in bits_of(self._blocks[block[:FIELD_BYTES]] & mask)}

    def expected(self, chain: Sequence[BlockHash]) -> dict[str, int]:
        """Like `leading`, for blocks that a node will hold soon because a prompt was sent there."""
        now = self._clock()
        found = {}
        for node, assumed in self._assumed.items():
            assumed.turn(now)
            if (length := _leading(chain, assumed)) > 0:
                found[node] = length
        return found

    def _nodes_of_bits(self) -> tuple[Mapping[int, str], int]:
        """Names of the nodes that may match, by their bits; and all those bits."""
        now = self._clock()
        for node in [n for n, (_, until_s) in self._inherited.items() if now >= until_s]:
            self._disinherit(node)
        if self._names is None:
            found = {bit: member.node for member, bit in self._bits.items()}
            found |= {bit: node for node, (bit, _) in self._inherited.items()}
            self._names = found, sum(found)
        if not self._suspects:
            return self._names
        found = {bit: node for bit, node in self._names[0].items() if not self.is_suspect(node)}
        return found, sum(found)

    def _join(self, member: Membership, before: Membership | None) -> None:
        if before is None:
            pass
        elif self._clock() < self._memory_lost_s + INHERIT_S:
            self._inherit(before)
        else:
            self._end(before)
            self._assumed.pop(member.node, None)
        self._members[member.node] = member
        self._bits[member] = self._new_bit()
        self._names = None

    def _replace(self, bits: dict[Membership, int]) -> None:
        """Put the lives of a snapshot in the place of those that were known."""
        known = list(self._bits)
        if any(member not in bits for member in known):
            self._memory_lost_s = self._clock()
        for member in known:
            if member in bits:
                self._end(member)
            else:
                self._inherit(member)
        self._bits = dict(bits)
        self._members = {member.node: member for member in bits}
        self._names = None

    def _inherit(self, member: Membership) -> None:
        """Believe a life that the index has forgotten for a while."""
        self._disinherit(member.node)
        self._inherited[member.node] = (self._bits.pop(member), self._clock() + INHERIT_S)
        del self._members[member.node]
        self._names = None

    def _disinherit(self, node: str) -> None:
        if entry := self._inherited.pop(node, None):
            self._release(entry[0])

    def _end(self, member: Membership) -> None:
        """A life is over: its bit goes out everywhere, and may be somebody else's."""
        self._release(self._bits.pop(member))
        del self._members[member.node]

    def _new_bit(self) -> int:
        if self._free_bits:
            return self._free_bits.pop()
        self._bits_made += 1
        return 1 << (self._bits_made - 1)

    def _release(self, bit: int) -> None:
        self._names = None
        self._blocks.drop(bit)
        self._free_bits.append(bit)


def _fields(hashes: Sequence[BlockHash]) -> Sequence[bytes]:
    """What the index keeps of each hash; its events carry no more."""
    return [block[:FIELD_BYTES] for block in hashes]


def bits_of(bitmap: int) -> list[int]:
    """The bits that are set, each as a bitmap."""
    bits = []
    while bitmap:
        bits.append(bitmap & -bitmap)
        bitmap &= bitmap - 1
    return bits


def _leading(chain: Sequence[BlockHash], assumed: _Assumed) -> int:
    """Leading blocks in ``assumed``: chains go in whole, so a bisection finds the end."""
    low, high = 0, len(chain)
    while low < high:
        middle = (low + high) // 2
        if assumed.holds(chain[middle][:FIELD_BYTES]):
            low = middle + 1
        else:
            high = middle
    return low
