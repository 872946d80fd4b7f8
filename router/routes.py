"""The requests that go on to a worker: path, label of metrics, and how their prompt is read."""

from collections.abc import Callable
from dataclasses import dataclass

from prefixfleet.router.body import Body
from prefixfleet.router.prompt import (
    Prompt,
    read_chat,
    read_completion,
    read_messages,
    read_nothing,
    read_responses,
)
from prefixfleet.router.tokens import Tokens


@dataclass(frozen=True, slots=True)
class Route:
    """``takes_plan``: the engine's request has ``kv_transfer_params``. ``computes``: the engine
    runs the prompt and may cache its prefix, so the tenant's salt goes with it; other bodies stay
    as they are. ``stores``: the engine may keep the answer, for requests that go on from it."""

    path: str
    name: str
    read_prompt: Callable[[Body, Tokens, str], Prompt]
    takes_plan: bool = True
    computes: bool = True
    stores: bool = False


def is_anthropic(path: str) -> bool:
    """Whether clients of ``path`` read errors in Anthropic's shape."""
    return path.startswith("/v1/messages")


ROUTES = (
    Route("/v1/chat/completions", "chat", read_chat),
    Route("/v1/completions", "completion", read_completion),
    Route("/v1/responses", "responses", read_responses, stores=True),
    Route("/v1/messages", "messages", read_messages),
    Route("/v1/messages/count_tokens", "tokenize", read_nothing, takes_plan=False, computes=False),
    Route("/v1/embeddings", "embeddings", read_nothing, takes_plan=False),
    Route("/v1/score", "score", read_nothing, takes_plan=False),
    Route("/v1/rerank", "score", read_nothing, takes_plan=False),
    Route("/tokenize", "tokenize", read_nothing, takes_plan=False, computes=False),
    Route("/detokenize", "tokenize", read_nothing, takes_plan=False, computes=False),
)
