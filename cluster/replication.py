"""A node's part in collective replication: what `prefixfleet.transfer.collective` needs of it."""

import time
from collections.abc import Callable, Sequence

from prefixfleet.cluster.peer_book import PeerBook
from prefixfleet.cluster.pool_host import PoolHost
from prefixfleet.cluster.settings import NodeSettings
from prefixfleet.store.chain import BlockHash
from prefixfleet.store.replication import Mode
from prefixfleet.transfer.collective import Replicator
from prefixfleet.transfer.collective_group import Member, Part
from prefixfleet.transfer.collective_worker import CollectiveWorker
from prefixfleet.transfer.link import Link


def replicate_pool(
    settings: NodeSettings,
    host: PoolHost,
    link: Link,
    peers: PeerBook,
    publish: Callable[[Sequence[BlockHash]], None],
) -> Replicator:
    """Have the pool take part as the settings say. Invitations go over ``link``; blocks that
    arrive are told to ``publish``. Open it, and close it before the pool."""
    part = Part(
        pool=host.pool,
        segment=host.segment.view,
        layout=host.kind.layout,
        namespace=host.kind.digest,
        node=settings.name,
        host=settings.host,
        worker=CollectiveWorker(host.segment.path, settings.collective_device),
        arrived=publish,
    )

    def members() -> list[Member]:
        return [
            Member(node, epoch, contacts[link.name])
            for node, epoch, contacts in peers.known()
            if link.name in contacts
        ]

    mode = Mode(settings.collective)
    replicator = Replicator(part, mode=mode, link=link, members=members, clock=time.monotonic)
    host.server.replication = replicator
    return replicator
