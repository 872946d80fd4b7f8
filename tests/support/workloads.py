"""Generated workloads of kinds that the public trace does not show. Equal seeds, equal requests.

Each is a list of `Request` in order of time. The shapes are ours, from how such clients behave;
none was fitted to a figure. Sizes are such that 1,000 to 50,000 blocks are worth comparing.
"""

import heapq
import itertools
import random
from collections.abc import Callable, Iterator
from typing import TypeAlias

from traces import Request, hashes

Ids: TypeAlias = list[int]


class _Making:
    """Fresh ids, and actions in order of time."""

    def __init__(self, seed: int) -> None:
        self.draw = random.Random(seed)
        self._ids = itertools.count()
        self._due: list[tuple[float, int, Iterator[float]]] = []
        self._order = itertools.count()
        self.now = 0.0
        self.made: list[Request] = []

    def fresh(self, count: float) -> Ids:
        return [next(self._ids) for _ in range(max(1, round(count)))]

    def size(self, median: float, spread: float = 0.8) -> float:
        return self.draw.lognormvariate(0.0, spread) * median

    def ask(self, chain: Ids) -> None:
        self.made.append(Request(self.now, hashes(chain)))

    def start(self, client: Iterator[float], at_s: float) -> None:
        """A client yields the seconds until it goes on."""
        heapq.heappush(self._due, (at_s, next(self._order), client))

    def run(self, requests: int) -> list[Request]:
        while self._due and len(self.made) < requests:
            self.now, _, client = heapq.heappop(self._due)
            if (pause := next(client, None)) is not None:
                self.start(client, self.now + pause)
        return self.made

    def arrivals(self, per_s: float, client: Callable[[], Iterator[float]]) -> Iterator[float]:
        """Starts clients for ever, Poisson."""
        while True:
            self.start(client(), self.now)
            yield self.draw.expovariate(per_s)

    def zipf(self, count: int, exponent: float) -> Callable[[], int]:
        weights = list(itertools.accumulate((i + 1) ** -exponent for i in range(count)))
        return lambda: self.draw.choices(range(count), cum_weights=weights)[0]


def _chat(
    make: _Making, system: Ids, *, go_on: float, think_s: float, words: float
) -> Iterator[float]:
    """One conversation: every turn sends all of it and a little more; some turns are asked anew."""
    chain = system + make.fresh(make.size(words))
    while True:
        make.ask(chain)
        if make.draw.random() > go_on:
            return
        yield make.size(think_s)
        if make.draw.random() < 0.1 and len(chain) > len(system) + 2:
            chain = chain[: -max(1, make.draw.randrange(len(chain) - len(system)))]
        chain = chain + make.fresh(make.size(3))


def chats(seed: int = 0) -> list[Request]:
    """Conversations behind 40 system prompts of unequal fame and length; half the turns go on."""
    make = _Making(seed)
    systems = [make.fresh(make.size(6)) for _ in range(40)]
    pick = make.zipf(40, 1.0)
    keen = [make.draw.uniform(0.2, 0.85) for _ in systems]

    def client() -> Iterator[float]:
        app = pick()
        return _chat(make, systems[app], go_on=keen[app], think_s=60, words=10)

    make.start(make.arrivals(1.5, client), 0.0)
    return make.run(9000)


def agents(seed: int = 0) -> list[Request]:
    """Tool loops: a long shared preamble, dozens of quick steps that each append a result, now and
    then a sub-task that branches off and is thrown away, and one-shot calls in between."""
    make = _Making(seed)
    preambles = [make.fresh(make.size(20, 0.5)) for _ in range(8)]
    pick = make.zipf(8, 0.8)

    def loop() -> Iterator[float]:
        chain = preambles[pick()] + make.fresh(make.size(6))
        for _ in range(1 + int(make.draw.expovariate(1 / 12))):
            make.ask(chain)
            yield make.size(8, 1.0)
            if make.draw.random() < 0.15:
                side = chain + make.fresh(make.size(4))
                for _ in range(make.draw.randrange(1, 4)):
                    make.ask(side)
                    yield make.size(5, 1.0)
                    side = side + make.fresh(make.size(3))
            chain = chain + make.fresh(make.size(2.5, 1.0))

    def single() -> Iterator[float]:
        make.ask(preambles[pick()] + make.fresh(make.size(12)))
        return iter(())

    make.start(make.arrivals(0.5, loop), 0.0)
    make.start(make.arrivals(3.0, single), 0.0)
    return make.run(9000)


def documents(seed: int = 0) -> list[Request]:
    """Long documents that get bursts of questions for a while; each question is asked once."""
    make = _Making(seed)
    system = make.fresh(3)

    def reader() -> Iterator[float]:
        document = system + make.fresh(make.size(60))
        for _ in range(1 + int(make.draw.paretovariate(1.1))):
            make.ask(document + make.fresh(make.size(2)))
            yield make.size(40, 1.0)

    make.start(make.arrivals(0.7, reader), 0.0)
    return make.run(5000)


def scans(seed: int = 0) -> list[Request]:
    """Chats, and every few minutes a batch job that reads hundreds of long texts once."""
    make = _Making(seed)
    systems = [make.fresh(make.size(5)) for _ in range(10)]
    pick = make.zipf(10, 0.8)

    def client() -> Iterator[float]:
        return _chat(make, systems[pick()], go_on=0.7, think_s=50, words=8)

    def batch() -> Iterator[float]:
        template = make.fresh(4)
        while True:
            yield make.draw.uniform(120, 300)
            for _ in range(make.draw.randrange(100, 300)):
                make.ask(template + make.fresh(make.size(40)))
                yield 0.2

    make.start(make.arrivals(1.0, client), 0.0)
    make.start(batch(), 0.0)
    return make.run(9000)


def shifts(seed: int = 0) -> list[Request]:
    """Hot documents by Zipf's law; the ranking is dealt anew every ten minutes."""
    make = _Making(seed)
    library = [make.fresh(make.size(25)) for _ in range(1500)]
    pick = make.zipf(len(library), 0.9)

    def reader() -> Iterator[float]:
        dealt = 0.0
        while True:
            if make.now - dealt > 600:
                make.draw.shuffle(library)
                dealt = make.now
            make.ask(library[pick()] + make.fresh(make.size(2)))
            yield make.draw.expovariate(2.0)

    make.start(reader(), 0.0)
    return make.run(7000)


def loops(seed: int = 0) -> list[Request]:
    """A job over a fixed set in a fixed order, larger than most caches: the worst for LRU."""
    make = _Making(seed)
    items = [make.fresh(make.size(20)) for _ in range(700)]

    def job() -> Iterator[float]:
        for item in itertools.cycle(items):
            make.ask(item)
            yield 0.5

    make.start(job(), 0.0)
    return make.run(6000)


def singles(seed: int = 0) -> list[Request]:
    """API calls: a few templates carry all reuse, nine of ten blocks are never asked for again."""
    make = _Making(seed)
    templates = [make.fresh(make.size(8)) for _ in range(300)]
    pick = make.zipf(len(templates), 1.1)

    def calls() -> Iterator[float]:
        while True:
            make.ask(templates[pick()] + make.fresh(make.size(14)))
            yield make.draw.expovariate(4.0)

    make.start(calls(), 0.0)
    return make.run(9000)


def recency(seed: int = 0) -> list[Request]:
    """What LRU is best at: the chance of reuse falls with age and with nothing else."""
    make = _Making(seed)
    items: list[Ids] = []

    def walk() -> Iterator[float]:
        while True:
            if items and make.draw.random() < 0.6:
                back = min(len(items), int(make.draw.paretovariate(0.6)))
                item = items.pop(-back)
            else:
                item = make.fresh(make.size(15))
            items.append(item)
            make.ask(item)
            yield make.draw.expovariate(3.0)

    make.start(walk(), 0.0)
    return make.run(8000)


def storms(seed: int = 0) -> list[Request]:
    """Chats, and every few minutes a long text that hundreds ask about within seconds."""
    make = _Making(seed)
    systems = [make.fresh(make.size(6)) for _ in range(20)]
    pick = make.zipf(20, 1.0)

    def client() -> Iterator[float]:
        return _chat(make, systems[pick()], go_on=0.6, think_s=50, words=10)

    def storm() -> Iterator[float]:
        while True:
            yield make.draw.uniform(60, 180)
            hot = make.fresh(make.size(50))
            for _ in range(make.draw.randrange(60, 200)):
                make.ask(hot + make.fresh(make.size(2)))
                yield make.draw.expovariate(20.0)

    make.start(make.arrivals(0.8, client), 0.0)
    make.start(storm(), 0.0)
    return make.run(9000)


def strangers(seed: int = 0) -> list[Request]:
    """Nothing is shared: every text is asked once, of every length."""
    make = _Making(seed)

    def calls() -> Iterator[float]:
        while True:
            make.ask(make.fresh(make.size(14)))
            yield make.draw.expovariate(4.0)

    make.start(calls(), 0.0)
    return make.run(9000)


WORKLOADS = {
    "chats": chats,
    "agents": agents,
    "documents": documents,
    "scans": scans,
    "shifts": shifts,
    "loops": loops,
    "singles": singles,
    "recency": recency,
    "storms": storms,
    "strangers": strangers,
}
