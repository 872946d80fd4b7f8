"""Clients of a chaos run, and the judge of what they got: every request ends, every answer is the
cold one, and errors have a reason."""

import asyncio
import itertools
import random
import time
from collections import Counter, deque
from dataclasses import dataclass, field
from typing import Any

import aiohttp
from chaos_model import BLOCK_TOKENS, cold_answer

DOCUMENTS, DOCUMENT_BLOCKS = 10, 16
ANSWER_LIMIT_S = 60.0
"""A request that takes longer hangs: no fault lasts longer than seconds."""
RECENT = 60


@dataclass(frozen=True, slots=True)
class Ended:
    """One request: when, at which router, and how it ended ("ok", "wrong", "hung" or an error)."""

    began_s: float
    ended_s: float
    router: int
    how: str


@dataclass
class Oracle:
    """Owned by the driver's loop. ``ended`` are all requests so far."""

    urls: list[str]
    seed: int
    ended: list[Ended] = field(default_factory=list)
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

    def from_router(self, first: int) -> list[str]:
        """All routers, beginning with that one."""
        return self.urls[first:] + self.urls[:first]

    def counts(self) -> Counter[str]:
        return Counter(request.how for request in self.ended)

    async def ask_for_ever(self, session: aiohttp.ClientSession) -> None:
        """One client."""
        number = next(self._numbers)
        dice = random.Random(self.seed * 1000 + number)
        while True:
            router = dice.randrange(len(self.urls))
            prompt = list(dice.choice(self._documents)[: dice.randint(2, 16) * BLOCK_TOKENS])
            prompt += dice.choices(range(1, 900), k=dice.randint(1, 40))
            began = self.now()
            how = await self._ask(session, self.from_router(router), prompt)
            self.ended.append(Ended(began, self.now(), router, how))
            if how != "ok":
                await asyncio.sleep(0.3)

    async def _ask(self, session: aiohttp.ClientSession, urls: list[str], prompt: list[int]) -> str:
        """The first router that listens is asked, as a load balancer before them does."""
        body = {"model": "tiny", "prompt": prompt, "max_tokens": 4}
        try:
            async with asyncio.timeout(ANSWER_LIMIT_S):
                async with await first_to_listen(session, urls, body) as response:
                    answer = await response.json()
        except TimeoutError:
            return "hung"
        except (aiohttp.ClientError, OSError, ValueError) as error:
            return f"connection: {type(error).__name__}"
        if response.status != 200:
            refusal = answer.get("error", {})
            self.note(f"{response.status} {refusal.get('message', answer)}")
            return f"status {response.status} {refusal.get('code', '')}"
        if answer["choices"][0]["text"] != await asyncio.to_thread(cold_answer, prompt):
            self.note(f"WRONG: {len(prompt)} tokens, {answer['kv_transfer_params']}")
            return "wrong"
        outcome = answer["kv_transfer_params"]["prefixfleet"]
        reused = outcome["local_blocks"] + outcome["pulled_blocks"]
        self.recent.append((reused, outcome["prompt_blocks"]))
        return "ok"

    def note(self, detail: str) -> None:
        """Keep one line for the report, of the first few."""
        if len(self.details) < 40:
            self.details.append(f"{self.now():.1f} s: {detail:.300}")


async def first_to_listen(
    session: aiohttp.ClientSession, urls: list[str], body: dict[str, Any]
) -> aiohttp.ClientResponse:
    """The answer of the first router that takes the connection. Raises what the last one did."""
    for url in urls[:-1]:
        try:
            return await session.post(f"{url}/v1/completions", json=body)
        except aiohttp.ClientConnectorError:
            continue
    return await session.post(f"{urls[-1]}/v1/completions", json=body)
