"""One request of a replay: sent to any OpenAI endpoint, streamed, and timed from outside."""

import asyncio
import itertools
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Annotated, Any

import aiohttp
import msgspec

MAX_ERROR_TEXT = 200
MAX_TOKENS = 1 << 40
"""A larger number in an answer is none of tokens."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """What one request did. Times in seconds; ``sent_s`` since the replay's start.

    ``ttft_s`` runs from sending to the first piece of text; ``gaps_s`` are the times between
    pieces. ``error`` is empty for a request that ended as it should.
    """

    sent_s: float
    late_s: float  # behind the trace's own time; large values mean the client was the limit
    ttft_s: float = 0.0
    total_s: float = 0.0
    gaps_s: tuple[float, ...] = ()
    prompt_tokens: int = 0
    cached_tokens: int = 0
    pulled_tokens: int = 0
    output_tokens: int = 0
    node: str = ""
    error: str = ""


_Count = Annotated[int, msgspec.Meta(ge=0, le=MAX_TOKENS)]


class _Details(msgspec.Struct):
    cached_tokens: _Count | None = None


class _Usage(msgspec.Struct):
    prompt_tokens: _Count = 0
    completion_tokens: _Count = 0
    prompt_tokens_details: _Details | None = None


class _Delta(msgspec.Struct):
    """What a chunk adds: text of the answer, of the thoughts before it, or of a call."""

    content: str | None = None
    reasoning_content: str | None = None
    reasoning: Any = None  # in some servers' answers an object
    tool_calls: list[Any] | None = None

    def says_something(self) -> bool:
        return bool(self.content or self.reasoning_content or self.reasoning or self.tool_calls)


class _Choice(msgspec.Struct):
    text: str | None = None
    delta: _Delta | None = None


class _Chunk(msgspec.Struct):
    choices: list[_Choice] = []
    usage: _Usage | None = None


def request_body(
    prompt: dict[str, Any], *, model: str, output_tokens: int
) -> tuple[str, dict[str, Any]]:
    """Path and body of a streamed request; what the trace's own request says is kept."""
    path = "/chat/completions" if "messages" in prompt else "/completions"
    body = {**prompt, "model": model, "stream": True, "stream_options": {"include_usage": True}}
    if output_tokens:
        body["max_tokens"] = output_tokens
        body["ignore_eos"] = True  # the trace says how long the answer was; unknown fields are
        body.pop("max_completion_tokens", None)  # ignored by endpoints that do not have them
    return path, body


async def send(
    session: aiohttp.ClientSession,
    url: str,
    body: dict[str, Any],
    *,
    started: float,
    due_s: float,
    timeout_s: Annotated[float, "the whole request"],
    clock: Callable[[], float] = time.monotonic,
) -> Sample:
    """Send, read to the end, and tell what happened; a failure is a sample with an error."""
    sent = clock()
    base = Sample(sent_s=sent - started, late_s=max(0.0, sent - started - due_s))
    try:
        async with asyncio.timeout(timeout_s), session.post(url, json=body) as answer:
            if answer.status != 200:
                text = (await answer.text(errors="replace"))[:MAX_ERROR_TEXT]
                return replace(base, error=f"HTTP {answer.status}: {text}")
            return await _read(answer, sent, base, clock)
    except TimeoutError:
        return replace(base, error=f"no end within {timeout_s:g} s")
    except (aiohttp.ClientError, msgspec.MsgspecError, ValueError) as error:  # or a line too long
        return replace(base, error=f"{type(error).__name__}: {error}"[:MAX_ERROR_TEXT])


async def _read(
    answer: aiohttp.ClientResponse, sent: float, base: Sample, clock: Callable[[], float]
) -> Sample:
    times: list[float] = []
    usage = _Usage()
    finished = False
    async for line in answer.content:
        if not line.startswith(b"data:"):
            continue
        data = line[5:].strip()
        if data == b"[DONE]":
            finished = True
            break
        chunk = msgspec.json.decode(data, type=_Chunk)
        usage = chunk.usage or usage
        if any(c.text or (c.delta and c.delta.says_something()) for c in chunk.choices):
            times.append(clock())
    cached = (usage.prompt_tokens_details or _Details()).cached_tokens or 0
    error = "" if finished and times else "the stream ended without text or without [DONE]"
    if cached > usage.prompt_tokens:
        error = f"usage: {cached} cached_tokens of {usage.prompt_tokens} prompt_tokens"
    return replace(
        base,
        ttft_s=times[0] - sent if times else 0.0,
        total_s=clock() - sent,
        gaps_s=tuple(b - a for a, b in itertools.pairwise(times)),
        prompt_tokens=usage.prompt_tokens,
        cached_tokens=cached,
        pulled_tokens=_number(answer.headers.get("x-prefixfleet-pulled-tokens")),
        output_tokens=usage.completion_tokens or len(times),
        node=answer.headers.get("x-prefixfleet-node", ""),
        error=error,
    )


def _number(text: str | None) -> int:
    return int(text) if text and text.isdecimal() and len(text) < 13 else 0
