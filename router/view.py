"""What this router believes about who holds which block: an in-memory copy of the index.

Fed by `PrefixIndex.snapshot` and `follow`, asked for every request, never over the network. Two
things are known here before the index knows them: blocks of prompts that were just routed
(`assume`), and nodes that failed before our eyes (`suspect`).
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

from prefixfleet.router.assumed import Assumed, bits_of, leading_of
from prefixfleet.router.block_table import BlockTable
from prefixfleet.store.chain import BlockHash
from prefixfleet.store.index import FIELD_BYTES, IndexEvent, Membership, Snapshot

SUSPECT_S = 5.0
"""How long a node that failed before our eyes matches nothing. Longer than its lease (3 s): if
it is dead, the index has forgotten it by then."""

INHERIT_S = 5.0
"""How long a life of a node is believed after the index lost its memory: until the node must have
noticed and joined again."""
REPUBLISH_S = 60.0
"""And from then on, at most, until it has published what it holds: `settle` says when."""
SETTLE_S = 1.0
"""What a node said before it had published the last block may be a second ahead of the events."""

LOAD_STEP_BLOCKS = 2_000  # 2 ms between two looks of the event loop at everything else


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
        self._assumed = Assumed(clock)

    def __len__(self) -> int:
        """Blocks that at least one node holds."""
        return len(self._blocks)

    @property
    def members(self) -> Mapping[str, Membership]:
        """Live nodes by name, as the index told us last; suspects included."""
        return self._members

    @property
    def awaited(self) -> set[str]:
        """Nodes that the index has forgotten and that are believed until they join again."""
        self._end_inherited()
        return self._inherited.keys() - self._members.keys()

    def load(self, snapshot: Snapshot) -> Iterator[None]:
        """Replace everything that came from the index, a bounded step at each ``next``.

        Until the last step the view answers as before; a big index takes seconds to take in. A
        life that we know and the snapshot does not has not ended: the index has lost its memory,
        and the nodes still have their blocks. It is believed for `INHERIT_S` more, and if its
        node has joined anew by then, until that life is told to be complete (`settle`).
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
            self._blocks.remove(_fields(event.hashes), self._bits_of_node(member.node))
        elif event.kind == "leave":
            self._end(member)
            self._disinherit(member.node)
            self._assumed.drop(member.node)

    def forget(self, gone: Iterable[Membership]) -> None:
        """Forget members whose lease ended, whether or not an event says so.

        Not while the index itself has just lost its memory: then it knows nobody's lease.
        """
        for member in gone if self._clock() >= self._memory_lost_s + INHERIT_S else ():
            self.apply(IndexEvent("leave", member))

    def settle(self, member: Membership) -> None:
        """This life has published all that it holds: nothing of a former one need be believed."""
        entry = self._inherited.get(member.node)
        if entry is not None and self._members.get(member.node) == member:
            self._inherited[member.node] = entry[0], min(entry[1], self._clock() + SETTLE_S)

    def suspect(self, node: str) -> None:
        """A connection to ``node`` failed: match nothing on it until its lease has had time."""
        self._suspects[node] = self._clock() + SUSPECT_S
        self._assumed.drop(node)

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
        self._assumed.add(node, chain)

    def leading(self, chain: Sequence[BlockHash]) -> dict[str, int]:
        """Live nodes to the number of leading blocks of ``chain`` that they hold; no zeros."""
        if not self._bits and not self._inherited:
            return {}
        names, mask = self._nodes_of_bits()
        return leading_of(chain, self._blocks.__getitem__, mask, names)

    def holders(self, block: BlockHash) -> set[str]:
        """The live nodes that hold the block."""
        nodes_of, mask = self._nodes_of_bits()
        return {nodes_of[bit] for bit in bits_of(self._blocks[block[:FIELD_BYTES]] & mask)}

    def expected(self, chain: Sequence[BlockHash]) -> dict[str, int]:
        """Like `leading`, for blocks that a node will hold soon because a prompt was sent there."""
        return self._assumed.leading(chain)

    def _nodes_of_bits(self) -> tuple[Mapping[int, str], int]:
        """Names of the nodes that may match, by their bits; and all those bits."""
        if self._inherited:
            self._end_inherited()
        if self._names is None:
            found = {bit: member.node for member, bit in self._bits.items()}
            found |= {bit: node for node, (bit, _) in self._inherited.items()}
            self._names = found, sum(found)
        if not self._suspects:
            return self._names
        names, mask = self._names
        for node in [n for n in list(self._suspects) if self.is_suspect(n)]:
            mask &= ~self._bits_of_node(node)
        return names, mask

    def _bits_of_node(self, node: str) -> int:
        """The bits of the present and of a former life of a node."""
        member, inherited = self._members.get(node), self._inherited.get(node)
        return (self._bits[member] if member else 0) | (inherited[0] if inherited else 0)

    def _join(self, member: Membership, before: Membership | None) -> None:
        if before is None:
            pass
        elif self._clock() < self._memory_lost_s + INHERIT_S:
            self._inherit(before)
        else:
            self._end(before)
            self._assumed.drop(member.node)
        self._members[member.node] = member
        self._bits[member] = self._new_bit()
        self._names = None
        self._await_publishing(member.node)

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
        for node in self._members:
            self._await_publishing(node)

    def _inherit(self, member: Membership) -> None:
        """Believe a life that the index has forgotten for a while."""
        self._end_inherited()
        until_s = self._clock() + INHERIT_S
        if before := self._inherited.get(member.node):
            self._end(member)  # it had not published everything: the one before it knows more
            self._inherited[member.node] = before[0], until_s
        else:
            self._inherited[member.node] = self._bits.pop(member), until_s
            del self._members[member.node]
            self._names = None

    def _await_publishing(self, node: str) -> None:
        """It has joined: what is believed of its former life holds until it is complete."""
        if entry := self._inherited.get(node):
            self._inherited[node] = entry[0], self._clock() + REPUBLISH_S

    def _end_inherited(self) -> None:
        now = self._clock()
        for node in [n for n, (_, until_s) in self._inherited.items() if now >= until_s]:
            self._disinherit(node)

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
