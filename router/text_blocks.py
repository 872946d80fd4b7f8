"""Prompts of text as blocks, to simulate them: what they share is exact, their length a guess.

Pure. No tokenizer is at hand that fits every log: a token counts as four bytes of UTF-8, about
right for English text, and as itself where the log holds token ids. Template and tools of a chat
come as they stand in the request.
"""

import json
from array import array
from collections.abc import Iterator
from hashlib import blake2b
from typing import Any

BYTES_PER_TOKEN = 4
BLOCK_TOKENS = 64
"""Short, so that what is shared is cut off little; longer than an engine's, so that a prompt of
100,000 tokens is not 6,000 blocks."""
ID_BITS = 63


def block_ids(body: dict[str, Any]) -> tuple[list[int], int]:
    """Ids of the blocks of a request body's prompt, each for everything up to its end, the last
    perhaps partial; and its tokens. Raises `ValueError` for what is no prompt."""
    text = b"".join(_parts(body))
    size, ids, before = BLOCK_TOKENS * BYTES_PER_TOKEN, [], b""
    for start in range(0, len(text), size):
        before = blake2b(before + text[start : start + size], digest_size=16).digest()
        ids.append(int.from_bytes(before[:8]) >> (64 - ID_BITS))
    return ids, -(-len(text) // BYTES_PER_TOKEN)


def _parts(body: dict[str, Any]) -> Iterator[bytes]:
    if "messages" not in body:
        yield from _prompt(body["prompt"])
        return
    if not isinstance(body["messages"], list):
        raise ValueError("messages is no list")
    if body.get("tools"):
        yield _json(body["tools"])
    for message in body["messages"]:
        if not isinstance(message, dict):
            raise ValueError("a message is no object")
        content = message.get("content")
        yield f"\n{message.get('role')}\n".encode()
        yield content.encode() if isinstance(content, str) else _json(content)
        if message.get("tool_calls"):
            yield _json(message["tool_calls"])


def _prompt(prompt: object) -> Iterator[bytes]:
    if isinstance(prompt, str):
        yield prompt.encode()
    elif isinstance(prompt, list) and all(type(token) is int for token in prompt):
        yield array("I", prompt).tobytes()  # four bytes each
    elif isinstance(prompt, list) and prompt and all(isinstance(p, str | list) for p in prompt):
        for each in prompt:
            yield from _prompt(each)
    else:
        raise ValueError("prompt is neither text nor token ids, nor a list of those")


def _json(value: object) -> bytes:
    return json.dumps(value, sort_keys=True).encode()
