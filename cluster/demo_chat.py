"""The demo's conversation: several users ask about one long document, in turns, by the router.

Afterwards every prompt is computed again with a salt nobody used: the cold answer to compare with.
"""

import asyncio
import uuid
from collections.abc import Callable
from dataclasses import dataclass

from prefixfleet.cluster.demo_ask import Answer
from prefixfleet.cluster.demo_fleet import DemoFleet
from prefixfleet.store.records import Outcome

QUESTIONS = (
    ("What is this text about?", "Name one rule it states."),
    ("Who would use this?", "What happens when a block is lost?"),
    ("What does the router do?", "How are nodes told apart after a restart?"),
)
"""One row a user, one question a turn."""

Messages = list[dict[str, str]]


@dataclass(frozen=True, slots=True)
class Turn:
    """One request of the conversation, and the same prompt computed cold."""

    user: int
    number: int
    answer: Answer
    outcome: Outcome | None
    cold: Answer

    @property
    def equal(self) -> bool:
        """Whether reuse changed nothing; a failed request is counted elsewhere."""
        failed = self.answer.error or self.cold.error
        return bool(failed) or self.answer.text == self.cold.text

    @property
    def why(self) -> str:
        """The router's decision in words, from its headers."""
        hit, pulled = self.answer.header("hit-tokens"), self.answer.header("pulled-tokens")
        estimate = f"estimate {self.answer.header('estimate-ms')} ms"
        if pulled not in ("", "0"):
            return f"free, pulls {pulled} tokens; {estimate}"
        if hit not in ("", "0"):
            return f"holds {hit} tokens; {estimate}"
        return f"nobody holds it; {estimate}"


async def converse(fleet: DemoFleet, document: str, step: Callable[[], None]) -> list[Turn]:
    """The whole conversation, then its prompts cold; users ask at the same time."""
    asked: list[tuple[int, int, Messages, Answer]] = []
    chats: list[Messages] = [
        [{"role": "system", "content": f"Answer briefly from this text.\n\n{document}"}]
        for _ in QUESTIONS
    ]

    async def ask(user: int, number: int) -> None:
        chats[user].append({"role": "user", "content": QUESTIONS[user][number]})
        messages = list(chats[user])
        answer = await fleet.router.chat(messages)
        chats[user].append({"role": "assistant", "content": answer.text})
        asked.append((user, number, messages, answer))
        step()

    await ask(0, 0)  # the first user fills the cache, the others find it
    await asyncio.gather(*(ask(user, 0) for user in range(1, len(QUESTIONS))))
    await asyncio.gather(*(ask(user, 1) for user in range(len(QUESTIONS))))
    turns = []
    for user, number, messages, answer in asked:
        cold = await fleet.router.chat(messages, salt=f"cold-{uuid.uuid4().hex}")
        turns.append(Turn(user, number, answer, await _outcome(fleet, answer), cold))
        step()
    return turns


async def _outcome(fleet: DemoFleet, answer: Answer) -> Outcome | None:
    if answer.error:
        return None
    return await fleet.outcome(fleet.seat(answer.header("node")), answer.header("request"))
