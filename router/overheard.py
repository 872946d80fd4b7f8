"""Answers that are heard while they pass: what they say on the way is of use to the router."""

from collections.abc import AsyncIterator, Sequence
from typing import Protocol

import msgspec

from prefixfleet.router.connection import Sink
from prefixfleet.router.upstream import Answer


class Hearer(Protocol):
    """Who hears an answer until ``done``."""

    done: bool

    def hear(self, part: bytes) -> None:
        """The next bytes of the answer."""
        ...


class Overheard(Answer, frozen=True):
    """An answer whose bytes are heard when they pass."""

    hearers: Sequence[Hearer]

    def _hear(self, part: bytes) -> None:
        for hearer in self.hearers:
            if not hearer.done:
                hearer.hear(part)

    async def rest(self) -> AsyncIterator[bytes]:
        """See `Answer`."""
        async for part in Answer.rest(self):
            self._hear(part)
            yield part

    async def relay(self, sink: Sink) -> None:
        """See `Answer`."""

        def hear(part: bytes, is_last: bool) -> None:
            self._hear(part)
            sink(part, is_last)

        await Answer.relay(self, hear)


def overheard(answer: Answer, hearers: Sequence[Hearer]) -> Answer:
    """``answer``, heard by ``hearers`` from its first byte on."""
    for hearer in hearers:
        hearer.hear(answer.first)
    left = [hearer for hearer in hearers if not hearer.done]
    return Overheard(**msgspec.structs.asdict(answer), hearers=left) if left else answer
