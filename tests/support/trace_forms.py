"""The same few conversations as a trace of each form that `read_trace` takes."""

import json
from pathlib import Path
from typing import Any

CONVERSATIONS, TURNS = 4, 3
TURN_TOKENS = 1024
PAUSE_S = 0.02


def _line(form: str, conversation: int, turn: int, at_s: float) -> dict[str, Any]:
    tokens, chat = TURN_TOKENS * (turn + 1), conversation * TURNS + turn
    if form in ("mooncake", "bailian"):
        block = 512 if form == "mooncake" else 16
        ids = [conversation * 10_000 + number for number in range(tokens // block)]
        line = {"input_length": tokens, "output_length": 2, "hash_ids": ids}
        if form == "mooncake":
            return line | {"timestamp": round(1000 * at_s)}
        parent = {"chat_id": chat, "parent_chat_id": chat - 1 if turn else -1, "turn": turn + 1}
        return line | parent | {"timestamp": at_s, "type": "text"}
    text = f"{conversation:04d}" * tokens
    if form == "completions":
        return {"timestamp": at_s, "prompt": text, "max_tokens": 2}
    body = {"messages": [{"role": "user", "content": text}], "max_tokens": 2}
    return {"custom_id": str(chat), "timestamp": at_s, "body": body}


FORMS = ("mooncake", "bailian", "chat", "completions")


def write_form(path: Path, form: str) -> Path:
    """The trace in ``form``; two thirds of its prompts' tokens come again in the next turn."""
    turns = [(c, t) for t in range(TURNS) for c in range(CONVERSATIONS)]
    lines = [_line(form, c, t, PAUSE_S * n) for n, (c, t) in enumerate(turns)]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path
