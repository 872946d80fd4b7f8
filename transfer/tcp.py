"""`TcpLink`: plain sockets, for hosts without UCX and for paths where it measures faster.

The peer sends the ranges as they lie in its segment; they are received where they belong.
"""

from collections import Counter

from prefixfleet.transfer.acceptor import Acceptor
from prefixfleet.transfer.channel import Channel
from prefixfleet.transfer.crew import Crew
from prefixfleet.transfer.link import Deadline, Service
from prefixfleet.transfer.session import Served


class TcpLink:
    """Fulfils `Link`. Owned by one event loop. ``port`` 0 takes a free one."""

    name = "tcp"
    rdma = False

    def __init__(
        self, *, node: str, secret: bytes, port: int = 0, heartbeat_s: float = 1.0
    ) -> None:
        self._node = node
        self._secret = secret
        self._port = port
        self._heartbeat_s = heartbeat_s
        self._crew = Crew(self.name)
        self.counters: Counter[str] = Counter()

    def reaches(self, contact: str) -> bool:
        """See `Link`."""
        return True

    async def listen(self, host: str, segment: memoryview, service: Service) -> Acceptor:
        """See `Link`."""
        served = Served(
            link=self.name,
            node=self._node,
            secret=self._secret,
            segment=segment,
            service=service,
            heartbeat_s=self._heartbeat_s,
            counters=self.counters,
            crew=self._crew,
        )
        return await Acceptor.open(host, self._port, served)

    async def connect(self, contact: str, *, deadline: Deadline) -> Channel:
        """See `Link`."""
        return await Channel.open(
            contact,
            link=self.name,
            node=self._node,
            secret=self._secret,
            heartbeat_s=self._heartbeat_s,
            deadline=deadline,
            crew=self._crew,
        )

    async def close(self) -> None:
        """See `Link`."""
        self._crew.close()
