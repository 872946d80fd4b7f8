"""A tokenised prompt, and what was hashed of it."""

from array import array
from collections.abc import Sequence

from msgspec import Struct, field

from prefixfleet.store.chain import BlockHash, extend_chain

MAX_CHAINS = 4
"""Of one prompt, the least recently used goes: clients may send a new salt with every request."""
_TOKEN_BYTES, _HASH_BYTES = 4, 60  # an id in an array; a hash and its place in a list
_BLOCK_TOKENS = 16  # of a chain that is not computed yet


class Rendered(Struct, eq=False):
    """Token ids of one rendered prompt, and the hash chains that were computed of them.

    Immutable but for the memo of chains. That is replaced, never changed: other threads read it.
    """

    token_ids: Sequence[int] = ()
    _chains: dict[tuple[BlockHash, int], list[BlockHash]] = field(default_factory=dict)

    def chain(self, root: BlockHash, block_tokens: int, key: bytes) -> list[BlockHash]:
        """`extend_chain` of all token ids from ``root``; only what is new is hashed."""
        chains, of = self._chains, (root, block_tokens)
        known = chains.get(of, [])
        grows = len(known) < len(self.token_ids) // block_tokens
        if grows:
            rest = self.token_ids[len(known) * block_tokens :]
            known = known + extend_chain(known[-1] if known else root, rest, block_tokens, key)
        if grows or (len(chains) > 1 and next(reversed(chains)) != of):
            others = [item for item in chains.items() if item[0] != of]
            self._chains = dict([*others[1 - MAX_CHAINS :], (of, known)])
        return known

    @property
    def num_bytes(self) -> int:
        """Memory of the ids and of the chains, about: one comes at least."""
        hashes = max(sum(map(len, self._chains.values())), len(self.token_ids) // _BLOCK_TOKENS)
        return len(self.token_ids) * _TOKEN_BYTES + hashes * _HASH_BYTES

    def continued(self, count: int, rest: Sequence[int]) -> "Rendered":
        """The prompt that shares the first ``count`` tokens and goes on with ``rest``."""
        token_ids = array("I", self.token_ids[:count])
        token_ids.extend(array("I", rest))  # one step, not one for each
        chains = {
            (root, size): chain[: count // size] for (root, size), chain in self._chains.items()
        }
        return Rendered(token_ids, chains)
