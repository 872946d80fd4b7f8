"""Clients of the real engines of a chaos run. Their cold answers are computed before anything is
broken, each under a salt that nobody shares; what comes later is held against them, token by token.
"""

import asyncio
import random
import secrets
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from typing import Any

import aiohttp
from chaos_client import OK, WRONG, Reply, ask, replied
from chaos_oracle import Oracle, refused

from prefixfleet.cluster.engine_command import BLOCK_TOKENS

MODEL = "real"
DOCUMENTS, BLOCKS, TAIL_TOKENS = 3, (2, 4, 6), 9
ANSWER_TOKENS = 6
COLD_S = 300.0
ANSWER_LIMIT_S = 180.0
"""Both engines may be away for a minute, and share their cores with everything else."""
TIE = 0.01
"""Two tokens whose log-probabilities are this close may change places with the batch's shape."""


@dataclass(frozen=True, slots=True)
class Cold:
    """The greedy answer without any cache, and how far ahead each of its tokens was."""

    tokens: list[int]
    leads: list[float]


@dataclass
class RealClients:
    """Owned by the driver's loop. What they ask ends in ``oracle.ended``."""

    oracle: Oracle
    seed: int
    asked: int = 0
    answered: int = 0
    ties: int = 0
    blocks: int = 0
    reused: int = 0
    _cold: dict[tuple[int, ...], Cold] = field(default_factory=dict)

    async def prepare(self, session: aiohttp.ClientSession) -> None:
        """Every prompt's cold answer."""
        dice = random.Random(self.seed)
        for _ in range(DOCUMENTS):
            document = dice.choices(range(400, 4_000), k=max(BLOCKS) * BLOCK_TOKENS)
            for blocks in BLOCKS:
                tail = dice.choices(range(400, 4_000), k=TAIL_TOKENS)
                prompt = document[: blocks * BLOCK_TOKENS] + tail
                asked = {"cache_salt": secrets.token_hex(8), "logprobs": 2}
                async with asyncio.timeout(COLD_S):
                    async with self._post(
                        session, self.oracle.urls[0], prompt, **asked
                    ) as response:
                        answer = await response.json()
                self._cold[tuple(prompt)] = _cold(answer["choices"][0])

    async def ask_for_ever(self, session: aiohttp.ClientSession, number: int) -> None:
        """One client."""
        dice = random.Random(self.seed * 1_000 + number)
        prompts = list(self._cold)
        while True:
            prompt, urls = dice.choice(prompts), self.oracle.urls

            def send(router: int, prompt: tuple[int, ...] = prompt) -> Any:
                return replied(
                    self._send(session, self.oracle.urls[router], prompt), ANSWER_LIMIT_S
                )

            request = await ask(send, len(urls), dice.randrange(len(urls)), self.oracle.now, dice)
            self.oracle.ended.append(request)
            self.asked += 1
            self.answered += request.official == OK
            if request.official != OK:
                self.oracle.note(f"real engine: {[s.how for s in request.sent]}")
                await asyncio.sleep(0.5)

    def report(self) -> dict[str, Any]:
        """What became of them."""
        share = self.reused / self.blocks if self.blocks else 0.0
        return {
            "requests": self.asked,
            "answered": self.answered,
            "ties": self.ties,
            "reused": round(share, 3),
        }

    async def _send(
        self, session: aiohttp.ClientSession, url: str, prompt: tuple[int, ...]
    ) -> Reply:
        async with self._post(session, url, list(prompt)) as response:
            if response.status != 200:
                return await refused(response)
            return Reply(self._judge(prompt, await response.json()))

    def _judge(self, prompt: tuple[int, ...], answer: dict[str, Any]) -> str:
        cold, got = self._cold[prompt], answer["choices"][0]["token_ids"]
        outcome = (answer.get("kv_transfer_params") or {}).get("prefixfleet") or {}
        if got != cold.tokens:
            differ = [a != b for a, b in zip(got, cold.tokens, strict=False)]
            if len(got) == len(cold.tokens) and cold.leads[differ.index(True)] < TIE:
                self.ties += 1
                return OK
            self.oracle.note(f"WRONG: {got}, cold {cold}, {outcome}")
            return WRONG
        kinds = ("engine_blocks", "local_blocks", "pulled_blocks")
        self.reused += sum(outcome.get(kind, 0) for kind in kinds)
        self.blocks += outcome.get("prompt_blocks", 0)
        return OK

    def _post(
        self, session: aiohttp.ClientSession, url: str, prompt: list[int], **fields: Any
    ) -> AbstractAsyncContextManager[aiohttp.ClientResponse]:
        body = {
            "model": MODEL,
            "prompt": prompt,
            "max_tokens": ANSWER_TOKENS,
            "temperature": 0,
            "ignore_eos": True,
            "return_token_ids": True,
        }
        return session.post(f"{url}/v1/completions", json=body | fields)


def _cold(choice: dict[str, Any]) -> Cold:
    leads = []
    for likely in choice["logprobs"]["top_logprobs"]:
        best = sorted(likely.values(), reverse=True)
        leads.append(best[0] - best[1] if len(best) > 1 else float("inf"))
    return Cold(list(choice["token_ids"]), leads)
