"""`Servers`: several pools behind one listener. Who is asked is told by what the question names."""

from collections.abc import Sequence

from prefixfleet.transfer import wire
from prefixfleet.transfer.link import Caller, Range
from prefixfleet.transfer.messages import Question, Release
from prefixfleet.transfer.serve import BlockServer


class Servers:
    """A `Service` for the listeners of a segment that several namespaces share.

    Owned by the daemon's event loop. There is one server at least, and each has its namespace to
    itself. Their leases are numbered together, and a leased slot's bytes are of no other pool.
    """

    def __init__(self) -> None:
        self._by_namespace: dict[bytes, BlockServer] = {}

    def add(self, server: BlockServer) -> None:
        """Serve one more pool from now on."""
        assert server.namespace not in self._by_namespace, "a namespace has one pool"
        self._by_namespace[server.namespace] = server

    def remove(self, server: BlockServer) -> None:
        """Serve this pool no more; not the only one."""
        del self._by_namespace[server.namespace]

    async def answer(self, caller: Caller, question: bytes) -> bytes:
        """See `Service`. Raises `ProtocolError` on a question that no correct peer asks."""
        asked: Question = wire.unpack(question, Question)
        return await self._asked(caller, asked).reply(caller, asked)

    def grants(self, caller: Caller, part: Range) -> bool:
        """See `Service`: whether leases of one pool cover the range."""
        return any(server.grants(caller, part) for server in self._all)

    def disconnected(self, caller: Caller) -> None:
        """See `Service`."""
        for server in self._all:
            server.disconnected(caller)

    @property
    def _all(self) -> Sequence[BlockServer]:
        return list(self._by_namespace.values())

    def _asked(self, caller: Caller, asked: Question) -> BlockServer:
        """Whom it concerns; of what concerns nobody here any one can say why not."""
        servers = self._all
        if isinstance(asked, Release):
            return next((s for s in servers if s.concerns(caller, asked)), servers[0])
        return self._by_namespace.get(asked.namespace, servers[0])
