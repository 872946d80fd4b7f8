"""What goes wrong in a chaos run, by a seed, and whom it spares. Pure.

The fault model: of each replicated kind one member is untouched at any moment, all others may fail
at once. Replicated are the routers, and for each model the hosts that serve it; a host is a node's
daemon, its engine and the links of both. Redis is one, and may fail. Nobody serves when none of a
kind is alive: that is `chaos_outages`, with requirements of its own.
"""

import random
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

HOST, ROUTER = "host", "router"

KINDS: Mapping[str, tuple[str, ...]] = {
    "kill node": (HOST,),
    "kill engine": (HOST,),
    "kill router": (ROUTER,),
    "freeze node": (HOST,),
    "freeze engine": (HOST,),
    "freeze router": (ROUTER,),
    "skew clock": (HOST, ROUTER),
    "cut peer": (HOST,),
    "freeze peer": (HOST,),
    "slow peer": (HOST,),
    "cut http": (HOST,),
    "freeze http": (HOST,),
    "slow http": (HOST,),
    "cut redis link": (HOST, ROUTER),
    "freeze redis link": (HOST, ROUTER),
    "slow redis link": (HOST, ROUTER),
    "spoil pool": (HOST,),
    "spoil disk": (HOST,),
    "fill disk": (HOST,),
    "restart redis empty": (),
    "freeze redis": (),
    "drop events": (),
    "repeat event": (),
}
"""Each kind of fault, and the kinds of members that it befalls; none: Redis."""

Groups = Mapping[str, Sequence[str]]
"""Members that stand in for each other, by a name whose first word is their kind."""


@dataclass(frozen=True, slots=True)
class Fault:
    """``kind`` happens to ``member`` for ``seconds``; the next fault follows ``pause_s`` later.

    ``member`` is a router, a node, which stands for its host, or empty for Redis.
    """

    kind: str
    member: str
    seconds: float
    pause_s: float


@dataclass(frozen=True, slots=True)
class Round:
    """Every kind of fault once. ``spare`` are each group's members, whoever is spared first."""

    spare: Mapping[str, tuple[str, ...]]
    faults: tuple[Fault, ...]


@dataclass
class Done:
    """A fault that was done, in the run's seconds."""

    fault: Fault
    began_s: float
    ended_s: float = field(default=float("inf"))


def rounds(seed: int, groups: Groups) -> Iterator[Round]:
    """Rounds without end; the same for the same seed."""
    dice = random.Random(seed)
    while True:
        spare = {name: tuple(dice.sample(of, len(of))) for name, of in groups.items()}
        kinds = list(KINDS)
        dice.shuffle(kinds)
        faults = (_fault(kind, groups, dice) for kind in kinds)
        yield Round(spare, tuple(fault for fault in faults if fault))


def _fault(kind: str, groups: Groups, dice: random.Random) -> Fault | None:
    befalls = KINDS[kind]
    able = [
        member
        for name, members in groups.items()
        for member in members
        if name.split()[0] in befalls and len(members) > 1
    ]
    if befalls and not able:
        return None  # the only one of its kind is always spared
    member = dice.choice(able) if befalls else ""
    return Fault(kind, member, dice.uniform(0.2, 2.5), dice.uniform(0.05, 0.6))


class Spared:
    """Who is untouched now, one of each group. Owned by the driver."""

    def __init__(self, groups: Groups) -> None:
        self._groups = groups
        self.now = {name: members[0] for name, members in groups.items()}

    def renew(self, spare: Mapping[str, Sequence[str]], hurt: Collection[str]) -> None:
        """Spare others: of each group the first that is not ``hurt``; whoever was is not."""
        for name, members in spare.items():
            self.now[name] = next(member for member in members if member not in hurt)

    def instead_of(self, member: str) -> str:
        """Who suffers what was meant for ``member``: itself, or the next if it is spared."""
        for name, members in self._groups.items():
            if self.now[name] == member:
                return members[(members.index(member) + 1) % len(members)]
        return member
