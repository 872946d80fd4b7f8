"""`Paths`: what this node knows of the ways to each peer, and which one a pull takes."""

import contextlib
from collections import Counter, OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import Any, TypeVar

from prefixfleet.store.chain import BlockHash
from prefixfleet.store.errors import PeerRefused
from prefixfleet.store.slot import SlotLayout
from prefixfleet.transfer.choice import LOCAL, Choice, choose_link
from prefixfleet.transfer.estimates import Estimates
from prefixfleet.transfer.link import Link

Value = TypeVar("Value")

MAX_PEERS = 1024
"""Peers and, for each link, addresses that are remembered; the longest unused go first."""
AVOID_S = 30.0
"""A link that failed to a peer is taken again after so long, or when there is no other."""
TYPICAL_BYTES = 16 * 1024 * 1024
"""Size of the pull for which status names the link."""


@dataclass(frozen=True, slots=True)
class Acquaintance:
    """A peer that blocks came from: where it is, and ``hashes`` that it probably still has."""

    contacts: Mapping[str, str]
    epoch: int
    namespace: bytes
    layout: SlotLayout
    hashes: tuple[BlockHash, ...]


class Paths:
    """Owned by the daemon's event loop. ``links`` are those of this node by name, ``forced`` is
    the only one that it may use, or None."""

    def __init__(
        self, links: Mapping[str, Link], forced: str | None, clock: Callable[[], float]
    ) -> None:
        self.estimates = Estimates(clock)
        self.lanes: dict[str, str] = {}  # by link: what carried the bytes of the latest pull
        self.failed: Counter[str] = Counter()  # sources that failed in a pull, by reason
        self.peers: OrderedDict[str, Acquaintance] = OrderedDict()  # by name
        self.links = links
        self.forced = forced
        self._clock = clock
        self._nodes: OrderedDict[str, str] = OrderedDict()  # contact to the name proved there
        self._avoid: OrderedDict[str, float] = OrderedDict()  # contact to until when

    def usable(self, contacts: Mapping[str, str]) -> dict[str, str]:
        """Contacts over which this host can reach the peer at all."""
        return {
            name: contact
            for name, contact in contacts.items()
            if name in self.links and self.links[name].reaches(contact)
        }

    def choose(
        self, contacts: Mapping[str, str], size_bytes: int, forced: str | None = None
    ) -> Choice:
        """The link for a pull of so many bytes. Raises `PeerRefused` if none will do."""
        now = self._clock()
        nodes = {name: self._nodes.get(contact, "") for name, contact in contacts.items()}
        return choose_link(
            self.usable(contacts),
            self.links,
            forced=forced or self.forced,
            fast=self.fast(),
            avoid=[name for name, at in contacts.items() if self._avoid.get(at, now) > now],
            speeds={name: self.estimates.speed(node, name) for name, node in nodes.items()},
            size_bytes=size_bytes,
        )

    def fast(self) -> list[str]:
        """Links of this node with an RDMA or CUDA lane."""
        return [name for name, link in self.links.items() if link.rdma]

    def in_use(self, contacts: Mapping[str, str]) -> list[str]:
        """Links that a pull from a peer may take while all are well: the one that a rule decides
        for, else each of those between which measuring decides."""
        usable = self.usable(contacts)
        if self.forced is not None:
            return [self.forced] if self.forced in usable else []
        if LOCAL in usable:
            return [LOCAL]
        return sorted(set(self.fast()) & set(usable)) or sorted(usable)

    def proved(self, link: str, contact: str, node: str, lanes: str) -> None:
        """A peer answered there, and has that name."""
        self.lanes[link] = lanes
        self._avoid.pop(contact, None)
        _remember(self._nodes, contact, node, len(self.links) * MAX_PEERS)

    def lost(self, contact: str) -> None:
        """A link failed there: rather take another one for a while."""
        until = self._clock() + AVOID_S
        _remember(self._avoid, contact, until, len(self.links) * MAX_PEERS)

    def met(self, node: str, acquaintance: Acquaintance) -> None:
        """Blocks came from this peer."""
        _remember(self.peers, node, acquaintance, MAX_PEERS)

    def report(self) -> dict[str, dict[str, Any]]:
        """By peer: the link that a pull would take now and why, its speed, and that of every
        link that was used. The routers read the speed; before the link was ever used it is that
        of the one used most."""
        found: dict[str, dict[str, Any]] = {}
        for node, links in self.estimates.as_dict().items():
            peer = self.peers.get(node)
            most = max(links, key=lambda link: links[link]["pulls"])
            choice = Choice(most, "")
            with contextlib.suppress(PeerRefused):  # its contacts changed; the next pull says so
                choice = self.choose(peer.contacts, TYPICAL_BYTES) if peer else choice
            known = links.get(choice.link, links[most])
            found[node] = asdict(choice) | known | {"links": links}
        return found


def _remember(known: OrderedDict[str, Value], key: str, value: Value, most: int) -> None:
    known[key] = value
    known.move_to_end(key)
    while len(known) > most:
        known.popitem(last=False)
