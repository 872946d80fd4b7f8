"""The demo's client: the public OpenAI client, streaming, timed from outside.

Through the router it is any client; to an engine it adds what a router would: the plan of a pull.
"""

import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import openai

from prefixfleet.store.records import PARAMS_KEY, PullPlan

MAX_TOKENS = 8
TIMEOUT_S = 180.0


@dataclass(frozen=True, slots=True)
class Answer:
    """One streamed answer. ``error`` is empty unless the request failed."""

    text: str = ""
    ttft_s: float = 0.0
    prompt_tokens: int = 0
    headers: Mapping[str, str] | None = None
    error: str = ""

    def header(self, name: str) -> str:
        """One of the router's headers, without its prefix; empty if it is not there."""
        return (self.headers or {}).get(f"x-prefixfleet-{name}", "")


class Asker:
    """Asks one endpoint, a router's or an engine's. Owned by the demo; close it."""

    def __init__(self, url: str, model: str) -> None:
        self._model = model
        self._client = openai.AsyncOpenAI(
            base_url=f"{url}/v1", api_key="none", timeout=TIMEOUT_S, max_retries=0
        )

    async def close(self) -> None:
        """Close its connections."""
        await self._client.close()

    async def chat(self, messages: Sequence[Mapping[str, str]], *, salt: str = "") -> Answer:
        """A chat completion, greedy."""
        raw: Any = self._client.chat.completions.with_raw_response
        return await self._ask(raw, {"messages": list(messages)}, salt, None)

    async def complete(
        self, prompt: str, *, salt: str = "", plan: PullPlan | None = None
    ) -> Answer:
        """A completion, greedy; ``plan`` is for an engine only, a router takes it out."""
        raw: Any = self._client.completions.with_raw_response
        return await self._ask(raw, {"prompt": prompt}, salt, plan)

    async def _ask(
        self,
        create: Any,  # noqa: ANN401 - the client's raw interfaces have no common type
        prompt: dict[str, Any],
        salt: str,
        plan: PullPlan | None,
    ) -> Answer:
        extra: dict[str, Any] = {"cache_salt": salt} if salt else {}
        if plan is not None:
            extra["kv_transfer_params"] = {PARAMS_KEY: asdict(plan)}
        started = time.monotonic()
        try:
            response = await create.create(
                model=self._model,
                max_tokens=MAX_TOKENS,
                temperature=0.0,
                stream=True,
                stream_options={"include_usage": True},
                extra_body=extra,
                **prompt,
            )
            return await _read(response, started)
        except openai.APIError as error:
            return Answer(error=f"{type(error).__name__}: {error}"[:300])


async def _read(response: Any, started: float) -> Answer:  # noqa: ANN401 - the client's raw type
    text, first, prompt_tokens = "", 0.0, 0
    async for chunk in response.parse():
        for choice in chunk.choices:
            piece = choice.delta.content if hasattr(choice, "delta") else choice.text
            if piece:
                first = first or time.monotonic()
                text += piece
        if chunk.usage:
            prompt_tokens = chunk.usage.prompt_tokens
    ttft_s = (first or time.monotonic()) - started
    return Answer(text, ttft_s, prompt_tokens, dict(response.headers))
