"""Broadcasts of hot prefixes in a simulated fleet: production's decisions, modelled time.

Which prefix is hot, who is invited, whether so many are worth it and who has room is the code
that nodes run. The time is that of a chain of nodes which pass on what they get: the bytes cross
each link once, and each hop adds `HOP_S`. A node that restarts meanwhile gets nothing; the others
are not held up. Who takes part in another broadcast stays out.
"""

from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

from prefixfleet.router.simulated_fleet import Fleet
from prefixfleet.router.simulated_node import SimulatedNode
from prefixfleet.router.view import View
from prefixfleet.store.chain import BlockHash
from prefixfleet.store.heat import Heat
from prefixfleet.store.holds import Reservation
from prefixfleet.store.index import Membership
from prefixfleet.store.replication import BUDGET_S, Mode, enough, lacking, reserved_for

HOP_S = 0.031
"""Set-up and passing on, for each receiver: DESIGN 5a's 64 MiB over 1 Gbit/s took 0.69 s to four
nodes in a chain, and a pull of them a quarter of 2.26 s; the difference over four hops."""

Schedule = Callable[[float, Callable[[], None]], None]
"""Calls back at a moment of simulated time."""

_Receiver = tuple[SimulatedNode, Reservation]


@dataclass(slots=True)
class Broadcasts:
    """Owned by its simulation. ``counters`` counts as `transfer.collective` does, blocks for
    bytes: a source "observed", "broadcasts", "too_few" and "busy", a receiver "received",
    "refused", "deadline" or "lost", and "received_blocks"."""

    fleet: Fleet
    nodes: Sequence[SimulatedNode]
    view: View
    schedule: Schedule
    publish: Callable[[SimulatedNode, tuple[BlockHash, ...]], None]
    counters: Counter[str] = field(default_factory=Counter)
    _heat: defaultdict[Membership, Heat] = field(default_factory=lambda: defaultdict(Heat))
    _taking_part: set[Membership] = field(default_factory=set)

    def leased(
        self, source: SimulatedNode, asker: str, chain: Sequence[BlockHash], now: float
    ) -> None:
        """``asker`` pulls ``chain``, from its root, from ``source``: perhaps it is hot now."""
        mode = self.fleet.replication
        if mode is Mode.OFF:
            return
        askers = self._heat[source.member].asked(asker, chain, now)
        if not askers:
            return
        by_name = {node.member.node: node for node in self.nodes}
        invited = [by_name[name] for name in lacking(by_name, source.member.node, askers)]
        if mode is Mode.OBSERVE:
            self.counters["observed"] += enough(len(invited))
        elif source.member in self._taking_part:
            self.counters["busy"] += 1
        else:
            self._broadcast(source, invited, tuple(chain), now)

    def _broadcast(
        self,
        source: SimulatedNode,
        invited: Sequence[SimulatedNode],
        chain: tuple[BlockHash, ...],
        now: float,
    ) -> None:
        receivers = self._receivers(invited, chain, now) if enough(len(invited)) else []
        if not enough(len(receivers)):
            for _, reservation in receivers:
                with reservation:  # gives all of it back
                    pass
            self.counters["too_few"] += 1
            return
        self.counters["broadcasts"] += 1
        taking_part = {source.member, *(node.member for node, _ in receivers)}
        self._taking_part |= taking_part
        pin = source.pool.pin(chain)

        def end() -> None:
            pin.release()
            self._taking_part.difference_update(taking_part)

        self.schedule(self._send(source, receivers, now), end)

    def _receivers(
        self, invited: Sequence[SimulatedNode], chain: tuple[BlockHash, ...], now: float
    ) -> list[_Receiver]:
        found: list[_Receiver] = []
        for node in invited:
            if node.member not in self._taking_part:
                node.keep_free(now, self.view)
                if (reservation := reserved_for(node.pool, chain)) is not None:
                    found.append((node, reservation))
        self.counters["refused"] += len(invited) - len(found)
        return found

    def _send(self, source: SimulatedNode, receivers: Sequence[_Receiver], now: float) -> float:
        """Occupy the links of the chain and let the blocks arrive; when all is over."""
        fleet, senders = self.fleet, [source, *(node for node, _ in receivers)][:-1]
        begins = max(now, *(node.sending_until for node in senders)) + fleet.hardware.link_setup_s
        block_s = fleet.hit_block_s + fleet.block_bytes / fleet.hardware.link_bytes_per_s
        until = now + BUDGET_S
        for sender, (node, reservation) in zip(senders, receivers, strict=True):
            blocks = len(reservation.hashes)
            sender.sending_until = min(begins + blocks * block_s, until)
            begins += HOP_S
            in_time = max(0, min(blocks, int((until - begins) / block_s)))
            over = min(begins + blocks * block_s, until)
            self.schedule(over, partial(self._arrive, node, node.member, reservation, in_time))
        return over

    def _arrive(
        self, node: SimulatedNode, member: Membership, reservation: Reservation, blocks: int
    ) -> None:
        with reservation:
            if node.member != member:  # it has restarted, and that pool is gone
                self.counters["lost"] += 1
                return
            arrived = tuple(b for b in reservation.hashes[:blocks] if reservation.commit(b))
        self.counters["received" if blocks == len(reservation.hashes) else "deadline"] += 1
        self.counters["received_blocks"] += len(arrived)
        self.publish(node, arrived)
