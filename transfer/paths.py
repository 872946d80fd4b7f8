"""`Paths`: what this node knows of the ways to each peer, and which one a pull takes."""

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from prefixfleet.transfer.choice import choose_link
from prefixfleet.transfer.estimates import Estimates
from prefixfleet.transfer.link import Link

MAX_CONTACTS = 4096
"""Addresses that are remembered; the longest unused is forgotten first."""
AVOID_S = 30.0
"""A link that failed to a peer is taken again after so long, or when there is no other."""


@dataclass(frozen=True, slots=True)
class _Known:
    node: str  # that was proved at this address; "" before
    avoid_until: float = float("-inf")


class Paths:
    """Owned by the daemon's event loop. ``links`` are those of this node by name, ``forced`` is
    the only one that it may use, or None."""

    def __init__(
        self, links: Mapping[str, Link], forced: str | None, clock: Callable[[], float]
    ) -> None:
        self.estimates = Estimates(clock)
        self.lanes: dict[str, str] = {}  # by link: what carried the bytes of the latest pull
        self.failed: Counter[str] = Counter()  # sources that failed in a pull, by reason
        self.links = links
        self.forced = forced
        self._clock = clock
        self._known: dict[str, _Known] = {}  # by contact

    def usable(self, contacts: Mapping[str, str]) -> dict[str, str]:
        """Contacts over which this host can reach the peer at all."""
        return {
            name: contact
            for name, contact in contacts.items()
            if name in self.links and self.links[name].reaches(contact)
        }

    def choose(
        self, contacts: Mapping[str, str], size_bytes: int, forced: str | None = None
    ) -> str:
        """Name of the link for a pull of so many bytes. Raises `PeerRefused` if none will do."""
        known = {name: self._known.get(at, _Known("")) for name, at in contacts.items()}
        return choose_link(
            self.usable(contacts),
            self.links,
            forced=forced or self.forced,
            fast=[name for name, link in self.links.items() if link.rdma],
            avoid=[name for name, it in known.items() if it.avoid_until > self._clock()],
            speeds={name: self.estimates.speed(it.node, name) for name, it in known.items()},
            size_bytes=size_bytes,
        )

    def proved(self, link: str, contact: str, node: str, lanes: str) -> None:
        """A peer answered there, and has that name."""
        self.lanes[link] = lanes
        self._remember(contact, _Known(node))

    def lost(self, contact: str) -> None:
        """A link failed there: rather take another one for a while."""
        known = self._known.get(contact, _Known(""))
        self._remember(contact, _Known(known.node, self._clock() + AVOID_S))

    def _remember(self, contact: str, known: _Known) -> None:
        self._known.pop(contact, None)
        self._known[contact] = known
        while len(self._known) > MAX_CONTACTS:
            del self._known[next(iter(self._known))]
