"""One node of a simulated fleet: its real pool and books, its modelled engine and link."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from prefixfleet.router.simulated_disk import SimulatedDisk
from prefixfleet.router.view import View
from prefixfleet.store import watermark
from prefixfleet.store.admission import ASKED_BLOCKS, make_room
from prefixfleet.store.chain import BlockHash
from prefixfleet.store.hit_times import HitTimes
from prefixfleet.store.holds import Victims
from prefixfleet.store.index import IndexEvent, Membership
from prefixfleet.store.pool import SlotPool
from prefixfleet.store.watermark import Watermark


@dataclass(slots=True)
class SimulatedNode:
    """Owned by its simulation. ``busy_until`` and ``sending_until`` are simulated seconds."""

    number: int
    member: Membership
    pool: SlotPool
    hit_times: HitTimes
    disk: SimulatedDisk
    mark: Watermark = field(init=False)
    busy_until: float = 0.0
    sending_until: float = 0.0

    def __post_init__(self) -> None:
        self.mark = watermark.start(self.pool.num_slots, 0.0)

    def compute(self, ready_s: float, seconds: float) -> float:
        """When a prefill of ``seconds`` ends: one at a time, this one not before ``ready_s``."""
        self.busy_until = max(self.busy_until, ready_s) + seconds
        return self.busy_until

    def send(self, ready_s: float, setup_s: float, seconds: float) -> float:
        """When what is sent has arrived: one after the other, this not before ``ready_s``."""
        self.sending_until = max(ready_s, self.sending_until) + setup_s + seconds
        return self.sending_until

    def store(self, chain: list[BlockHash], view: View, now: float) -> tuple[BlockHash, ...]:
        """Keep the chain of a prompt that was computed here; the blocks that are new.

        What must go for it is gone from ``view`` at once.
        """
        self.pool.observe(chain)
        with self.pool.pin(chain) as here:
            missing = self._admit(chain, len(here.hashes), view)
            parent = here.hashes[-1] if here.hashes else b""
            with self.pool.reserve(parent, missing) as reservation:
                self._follow(now, taken=len(missing))
                return tuple(block for block in missing if reservation.commit(block))

    def keep_free(self, now: float, view: View) -> None:
        """Have as many slots free as the mark says. A node has them before they are needed; here
        those blocks stay until they must go."""
        self._follow(now)
        missing = self.mark.keep_free - self.pool.free_slots
        self._leave(self.pool.choose_victims(max(0, missing)), view)

    def _follow(self, now: float, taken: int = 0) -> None:
        self.mark = watermark.follow(self.mark, taken=taken, waiting=0, refused=0, now=now)

    def read(self, chain: Sequence[BlockHash], ready_s: float, until_s: float) -> tuple[int, float]:
        """Have ``chain``'s leading blocks at hand: how many by ``until_s``, and when."""
        in_memory = self.pool.match(chain)
        read, there_s = self.disk.read(chain[in_memory:], ready_s, until_s)
        self.hit_times.read(in_memory + read, there_s - ready_s)
        return in_memory + read, there_s

    def _leave(self, victims: Victims, view: View) -> None:
        self.pool.free(victims)
        gone = self.disk.keep(victims.hashes)
        nowhere = tuple(block for block in gone if not self.pool.match([block]))
        view.apply(IndexEvent("withdraw", self.member, nowhere))

    def _admit(self, chain: list[BlockHash], held: int, view: View) -> list[BlockHash]:
        """Those of the chain's blocks behind the ``held`` ones that are stored; room is made."""
        pool, missing = self.pool, chain[held:]
        if pool.free_slots < len(missing):
            others = {b: view.holders(b) - {self.member.node} for b in pool.soon(ASKED_BLOCKS)}
            pool.note_copies({block: len(nodes) for block, nodes in others.items()})
        room = make_room(pool, missing)
        self._leave(room.victims, view)
        return missing[: room.blocks]

    def leave(self, view: View) -> None:
        """It is gone, and what was meant for this life comes too late; `restart` brings it back.
        What it was sending has arrived."""
        view.apply(IndexEvent("leave", self.member))
        self.member = Membership(self.member.node, self.member.epoch + 1, self.member.slot)

    def restart(self, pool: Callable[[], SlotPool], view: View) -> None:
        """Lose every block in memory and join anew, with those on disk."""
        self.member = Membership(self.member.node, self.member.epoch + 1, self.member.slot)
        view.apply(IndexEvent("join", self.member))
        view.apply(IndexEvent("publish", self.member, self.disk.held()))
        self.pool = pool()
