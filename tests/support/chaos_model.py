"""What the fake engines of a chaos run compute: KV bytes from block hashes, answers from KV bytes.

One wrong byte of one block changes the answer; the oracle computes the same from the prompt alone.
"""

import hashlib
from collections.abc import Sequence

from upstreams import NAMESPACE, SECRET

from prefixfleet.router.prompt import Prompt, prefix_chain
from prefixfleet.router.rendered import Rendered
from prefixfleet.store.namespace import hash_key
from prefixfleet.store.slot import SlotLayout

PAYLOAD_BYTES = 8000
LAYOUT = SlotLayout(payload_bytes=PAYLOAD_BYTES)
BLOCK_TOKENS = NAMESPACE.block_tokens


def chain_of(token_ids: Sequence[int]) -> list[bytes]:
    """The prefix chain that the fleet's routers and engines compute."""
    prompt = Prompt(rendered=Rendered(token_ids), tokens=len(token_ids))
    return prefix_chain(prompt, NAMESPACE.digest(SECRET), BLOCK_TOKENS, hash_key(SECRET))


def kv_of(block: bytes) -> bytes:
    """A block's KV, as an engine computes it."""
    return hashlib.shake_128(block).digest(PAYLOAD_BYTES)


def answer_of(kv: Sequence[bytes], token_ids: Sequence[int]) -> str:
    """The "greedy answer": depends on every byte of every full block, and on the tail."""
    state = hashlib.sha256()
    for block in kv:
        state.update(block)
    state.update(repr(list(token_ids[len(kv) * BLOCK_TOKENS :])).encode())
    return state.hexdigest()


def cold_answer(token_ids: Sequence[int]) -> str:
    """What an engine without any cache answers."""
    return answer_of([kv_of(block) for block in chain_of(token_ids)], token_ids)
