"""What a router reads of its fleet, from the outside. Who opened it closes it."""

from dataclasses import dataclass, field

from prefixfleet.router.exchange import Board
from prefixfleet.router.keepers import SharedKeepers
from prefixfleet.router.orders import OrderStore
from prefixfleet.router.worker_list import Registry
from prefixfleet.store.index import PrefixIndex
from prefixfleet.store.poll_rights import PollRights


@dataclass(frozen=True, slots=True)
class Fleet:
    """``secret`` is the cluster's; a router does without whatever is None."""

    index: PrefixIndex
    registry: Registry
    secret: bytes = field(repr=False)
    orders: OrderStore | None = None
    loads: Board | None = None
    engines: PrefixIndex | None = None  # `ENGINE_AREA`: what engines hold in their own caches
    polls: PollRights | None = None
    responses: SharedKeepers | None = None
