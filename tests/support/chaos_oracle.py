"""Clients of a chaos run, and the judge of what they got: every request ends, every answer is the
cold one, a stream that breaks says so, and errors have a reason."""

import asyncio
import itertools
import json
import random
import time
from collections import Counter, deque
from dataclasses import dataclass, field
from typing import Any

import aiohttp
from chaos_client import (
    OK,
    STREAM_CUT,
    STREAM_TOLD,
    WRONG,
    Reply,
    Request,
    ask,
    replied,
    reply_of,
)
from chaos_model import BLOCK_TOKENS, cold_answer

DOCUMENTS, DOCUMENT_BLOCKS = 10, 16
ANSWER_LIMIT_S = 60.0
"""A sending that takes longer hangs: no fault lasts longer than seconds."""
RECENT = 60
STREAMED = 0.3
"""Share of requests that ask for a stream."""


@dataclass
class Oracle:
    """Owned by the driver's loop. ``ended`` are all requests so far."""

    urls: list[str]
    seed: int
    ended: list[Request] = field(default_factory=list)
    recent: deque[tuple[int, int]] = field(default_factory=lambda: deque(maxlen=RECENT))
    details: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        dice = random.Random(self.seed)
        length = DOCUMENT_BLOCKS * BLOCK_TOKENS
        self._documents = [dice.choices(range(1, 900), k=length) for _ in range(DOCUMENTS)]
        self._numbers = itertools.count()
        self.started = time.monotonic()

    def now(self) -> float:
        return time.monotonic() - self.started

    @property
    def reuse(self) -> float:
        """Share of prompt blocks that were not computed, of the latest answers."""
        prompt = sum(p for _, p in self.recent)
        return sum(r for r, _ in self.recent) / prompt if prompt else 0.0

    def counts(self) -> Counter[str]:
        return Counter(request.official for request in self.ended)

    async def ask_for_ever(self, session: aiohttp.ClientSession) -> None:
        """One client."""
        number = next(self._numbers)
        dice = random.Random(self.seed * 1000 + number)
        while True:
            prompt = list(dice.choice(self._documents)[: dice.randint(2, 16) * BLOCK_TOKENS])
            prompt += dice.choices(range(1, 900), k=dice.randint(1, 40))
            stream = dice.random() < STREAMED

            def send(router: int, prompt: list[int] = prompt, stream: bool = stream) -> Any:
                sending = self._send(session, self.urls[router], prompt, stream)
                return replied(sending, ANSWER_LIMIT_S)

            first = dice.randrange(len(self.urls))
            request = await ask(send, len(self.urls), first, self.now, dice)
            self.ended.append(request)
            if request.official != OK:
                self.note(f"{[(round(s.began_s, 1), s.how) for s in request.sent]}")
                await asyncio.sleep(0.3)

    async def _send(
        self, session: aiohttp.ClientSession, url: str, prompt: list[int], stream: bool
    ) -> Reply:
        body = {"model": "tiny", "prompt": prompt, "max_tokens": 4}
        body |= {"stream": True} if stream else {}
        async with session.post(f"{url}/v1/completions", json=body) as response:
            if response.status != 200:
                return await refused(response)
            if stream:
                return await self._judge_stream(response, prompt)
            return await self._judge(await response.json(), prompt)

    async def _judge(self, answer: dict[str, Any], prompt: list[int]) -> Reply:
        if answer["choices"][0]["text"] != await asyncio.to_thread(cold_answer, prompt):
            self.note(f"WRONG: {len(prompt)} tokens, {answer['kv_transfer_params']}")
            return Reply(WRONG)
        outcome = answer["kv_transfer_params"]["prefixfleet"]
        reused = outcome["local_blocks"] + outcome["pulled_blocks"]
        self.recent.append((reused, outcome["prompt_blocks"]))
        return Reply(OK)

    async def _judge_stream(self, response: aiohttp.ClientResponse, prompt: list[int]) -> Reply:
        """A stream has an end: ``[DONE]``, an error event, or a connection that breaks."""
        text, done = "", False
        try:
            async for line in response.content:
                data = line.removeprefix(b"data: ").strip()
                if data == b"[DONE]":
                    done = True
                elif data:
                    event = json.loads(data)
                    if "error" in event:
                        return Reply(STREAM_TOLD)
                    text += event["choices"][0]["text"]
        except (aiohttp.ClientError, OSError):
            if not done:
                return Reply(STREAM_CUT)
        if not done:
            return Reply("unclear: a stream ended as if it were whole")
        return Reply(OK if text == await asyncio.to_thread(cold_answer, prompt) else WRONG)

    def note(self, detail: str) -> None:
        """Keep one line for the report, of the first few."""
        if len(self.details) < 40:
            self.details.append(f"{self.now():.1f} s: {detail:.300}")


async def refused(response: aiohttp.ClientResponse) -> Reply:
    """An error answer, which must say what it is in OpenAI's shape."""
    try:
        error = json.loads(await response.read())["error"]
        how = f"{response.status} {error['code']}"
        assert error["message"]
        assert error["type"]
    except (ValueError, KeyError, TypeError, AssertionError):
        return Reply(f"unclear: {response.status} without an error object")
    return reply_of(response.status, response.headers, how)
