"""The eviction orders by the names that settings use."""

from typing import Literal

from prefixfleet.store.eviction import EvictionOrder, LruOrder
from prefixfleet.store.eviction_fifo import S3FifoOrder
from prefixfleet.store.eviction_value import ValueOrder

OrderName = Literal["lru", "s3-fifo", "value"]


def new_order(name: OrderName, num_slots: int) -> EvictionOrder:
    """An order for a pool of ``num_slots``."""
    if name == "value":
        return ValueOrder(num_slots)
    return S3FifoOrder(num_slots) if name == "s3-fifo" else LruOrder()
