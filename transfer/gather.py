"""`Gathering`: one pull from one source after the other, or from several at once.

Decides who reads next; the reading itself is `prefixfleet.transfer.source`. A source that fails
is replaced by another, by the same one over another link, or by one that helped before.
"""

import asyncio
import contextlib
from collections import deque
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass

from prefixfleet.store.errors import (
    DeadlineExceeded,
    PeerLost,
    ProtocolError,
)
from prefixfleet.transfer.assembly import Assembly
from prefixfleet.transfer.deadline import until
from prefixfleet.transfer.reading import Read
from prefixfleet.transfer.source import Later

MISSING = "missing"
"""Failure of a pull whose sources no longer had all blocks."""
LINK_FAILURES = frozenset(error.reason for error in (PeerLost, DeadlineExceeded, ProtocolError))
"""Reasons for which the same source is worth a try over another link."""


@dataclass(frozen=True, slots=True)
class Source:
    """One life of a node that may have the blocks: its address by link, and its epoch."""

    contacts: Mapping[str, str]
    epoch: int


Others = Callable[[], Awaitable[Sequence[Source]]]
"""Asked at most once in a pull, when it wants more sources than it was given. Does not raise."""


class Gathering:
    """Owned by one pull. ``begin`` starts to read from a source; ``ended`` hears of each that is
    done with, and says why it failed ("" if it did not). ``at_once`` sources are read from.

    After `run`, ``tried`` are the reads that were begun, ``failure`` is why the latest failed.
    """

    def __init__(
        self,
        assembly: Assembly,
        first: Read,
        *,
        others: Others | None,
        at_once: int,
        begin: Callable[[Read, Assembly], Awaitable[None]],
        ended: Callable[[Read, "asyncio.Task[None]"], str],
        later: Later,
    ) -> None:
        self.tried: list[Read] = []
        self.failure = MISSING
        self._assembly = assembly
        self._model = first
        self._candidates = deque([first])
        self._spare: list[Read] = []  # for when nobody else is left
        self._others = others
        self._at_once = at_once
        self._begin = begin
        self._ended = ended
        self._later = later
        self._reading: dict[asyncio.Task[None], Read] = {}
        self._asking: asyncio.Task[None] | None = None

    async def run(self) -> None:
        """Returns when all blocks are here that can be, or nobody is left to ask.

        Then nothing writes into a slot of the assembly any more. When it is cancelled, that is
        so when it has raised.
        """
        try:
            while not self._assembly.settled:
                self._start()
                waiting = {*self._reading, *([self._asking] if self._asking else [])}
                if not waiting:
                    break
                done, _ = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
                for task in done:
                    self._take_end(task)
        except BaseException:  # cancelled: nobody may write when the pull's slots are given back
            for task in self._reading:
                task.cancel()
            await asyncio.gather(*self._reading, return_exceptions=True)
            raise
        finally:
            if self._asking is not None:
                self._asking.cancel()
        for task, read in self._reading.items():  # they were not needed: they find nothing to do
            self._later(self._wait_for(read, task))

    def _start(self) -> None:
        wanted = self._at_once - len(self._reading)
        if self._others is not None and len(self._candidates) < wanted:
            self._asking, self._others = asyncio.create_task(self._ask(self._others)), None
        if not self._candidates and self._asking is None:
            self._candidates.extend(self._spare)
            self._spare = []
        while self._candidates and self._assembly.next is not None and wanted > 0:
            read = self._candidates.popleft()
            self.tried.append(read)
            self._reading[asyncio.create_task(self._read(read))] = read
            wanted -= 1

    async def _read(self, read: Read) -> None:
        await self._begin(read, self._assembly)

    async def _ask(self, others: Others) -> None:
        with contextlib.suppress(DeadlineExceeded):
            async with until(self._model.deadline, "ask who else has the blocks"):
                for source in await others():
                    self._candidates.append(self._model.of(source.contacts, source.epoch))

    def _take_end(self, task: "asyncio.Task[None]") -> None:
        if task is self._asking:
            self._asking = None
            task.result()
            return
        read = self._reading.pop(task)
        failure = self._ended(read, task)
        if failure:
            self.failure = failure
            left = {name: at for name, at in read.contacts.items() if name != read.link}
            if failure in LINK_FAILURES and read.forced is None and left:
                self._spare.append(read.of(left, read.epoch))
        elif read.blocks:  # it may help again, with what another one fails to bring
            self._spare.append(read.of(read.contacts, read.epoch))

    async def _wait_for(self, read: Read, task: "asyncio.Task[None]") -> None:
        await asyncio.wait({task})
        self._ended(read, task)
