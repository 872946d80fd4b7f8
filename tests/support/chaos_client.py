"""How clients ask in a chaos run: as the official OpenAI clients behind a load balancer do.

A router that takes no connection is passed over for another one. A request that got no answer, 408,
409, 429 or 500 and more is sent again, twice, after 0.5 s and 1 s less up to a quarter, or after
what ``Retry-After`` says (openai-python, ``_base_client.py``). A stream that has begun is not.
"""

import asyncio
import random
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import aiohttp

RETRIES = 2
FIRST_BACKOFF_S = 0.5
LONGEST_RETRY_AFTER_S = 60.0
OK, WRONG, HUNG, REFUSED, RESET = "ok", "wrong", "hung", "refused", "reset"
STREAM_TOLD, STREAM_CUT = "stream: error event", "stream: cut"
BROKEN_STREAMS = (STREAM_TOLD, STREAM_CUT)
"""A stream that broke and says so, by an event or by the connection."""


@dataclass(frozen=True, slots=True)
class Reply:
    """How one sending ended; whether the client sends ``again``, and after how long it is told."""

    how: str
    again: bool = False
    after_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Ended:
    """One sending: when, to which router, and how it ended."""

    began_s: float
    ended_s: float
    router: int
    how: str


@dataclass(frozen=True, slots=True)
class Request:
    """All sendings of one request, at least one."""

    sent: tuple[Ended, ...]

    @property
    def plain(self) -> str:
        """How it ended for a client that knows one router and never asks again."""
        return self.sent[0].how

    @property
    def balanced(self) -> str:
        """How it ended for a client behind a load balancer that never asks again."""
        return next((s.how for s in self.sent if s.how != REFUSED), REFUSED)

    @property
    def official(self) -> str:
        """How it ended for a client as described above."""
        return self.sent[-1].how


def reply_of(status: int, headers: Mapping[str, str], how: str) -> Reply:
    """What the client makes of an error answer."""
    again = status in (408, 409, 429) or status >= 500
    after = headers.get("Retry-After", "")
    after_s = float(after) if after.isdecimal() else 0.0
    return Reply(how, again, after_s if after_s <= LONGEST_RETRY_AFTER_S else 0.0)


async def replied(send: Awaitable[Reply], limit_s: float) -> Reply:
    """The end of one sending, whatever it is."""
    try:
        async with asyncio.timeout(limit_s):
            return await send
    except TimeoutError:
        return Reply(HUNG)
    except aiohttp.ClientConnectorError:
        return Reply(REFUSED, again=True)
    except (aiohttp.ClientError, OSError):
        return Reply(RESET, again=True)


async def ask(
    send: Callable[[int], Awaitable[Reply]],
    routers: int,
    first: int,
    clock: Callable[[], float],
    dice: random.Random,
) -> Request:
    """One request, until it is answered or the client gives up; ``send`` sends it to a router."""
    sent: list[Ended] = []
    for pause_s in _backoffs(dice):
        for offset in range(routers):
            router = (first + offset) % routers
            began = clock()
            reply = await send(router)
            sent.append(Ended(began, clock(), router, reply.how))
            if reply.how != REFUSED:
                break
        if not reply.again or pause_s is None:
            break
        await asyncio.sleep(reply.after_s or pause_s)
    return Request(tuple(sent))


def _backoffs(dice: random.Random) -> Iterator[float | None]:
    for number in range(RETRIES):
        yield FIRST_BACKOFF_S * 2**number * (1 - 0.25 * dice.random())
    yield None


def errors(hows: Sequence[str]) -> dict[str, int]:
    """How often each kind of error came; a broken stream is none."""
    bad = [how for how in hows if how != OK and how not in BROKEN_STREAMS]
    return {kind: bad.count(kind) for kind in sorted(set(bad))}
