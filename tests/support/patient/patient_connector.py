"""The connector in an engine of a test that counts blocks: it waits for its node's daemon however
long a machine stalls. With its own limits a daemon that is late is a miss, as it should be, and the
count is another one.
"""

from prefixfleet.cluster import (
    connector_lookup,
    connector_pool,
    connector_session,
    engine_client,
)
from prefixfleet.cluster.connector import PrefixfleetConnector

__all__ = ["PrefixfleetConnector"]

STALL_S = 60.0

connector_lookup.GRACE_S = STALL_S
connector_pool.ASK_S = STALL_S
connector_session.SETTLE_S = STALL_S
engine_client.CONNECT_S = STALL_S
