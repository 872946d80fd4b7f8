"""Token ids to prefix chain: one keyed hash a full block, each over its parent and its tokens.

Router and engine both call this; nothing else in the project hashes tokens.
"""

import hashlib
from array import array
from collections.abc import Mapping, Sequence
from typing import TypeAlias

from prefixfleet.store.namespace import DIGEST_BYTES

BlockHash: TypeAlias = bytes
"""``DIGEST_BYTES`` bytes; equal hash means equal tokens, scope and namespace up to there."""

SEGMENT_BLOCKS = 128
"""Blocks that share one key of the index; a segment is named by the hash of its first block."""


def extend_chain(
    parent: BlockHash,
    token_ids: Sequence[int],
    block_tokens: int,
    key: bytes,
    extras: Mapping[int, bytes] | None = None,
) -> list[BlockHash]:
    """Hashes of the full blocks of ``token_ids``, the first one a child of ``parent``.

    ``key`` comes from `hash_key`. ``extras`` maps a block's position in this call to more bytes
    that change its KV (the digests of the images that overlap it). A tail shorter than
    ``block_tokens`` has no hash. Token ids are unsigned 32-bit integers.

    Raises:
        OverflowError: a token id does not fit.
    """
    tokens = array("I", token_ids).tobytes()
    step = block_tokens * array("I").itemsize
    keyed = hashlib.blake2b(digest_size=DIGEST_BYTES, key=key, person=b"pf-block")
    hashes: list[BlockHash] = []
    for position, start in enumerate(range(0, len(tokens) - step + 1, step)):
        state = keyed.copy()
        state.update(parent)
        state.update(tokens[start : start + step])
        if extras and (extra := extras.get(position)):
            state.update(extra)
        parent = state.digest()
        hashes.append(parent)
    return hashes


def segment_heads(chain: Sequence[BlockHash]) -> Sequence[BlockHash]:
    """Head of each block's segment, aligned with ``chain``, which must start at the root."""
    return [chain[i - i % SEGMENT_BLOCKS] for i in range(len(chain))]
