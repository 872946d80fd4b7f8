"""The half of a peer that every link has in common: questions over the authenticated channel.

How bytes are read is each link's own. Must not know slots or blocks.
"""

from prefixfleet.transfer.channel import Channel
from prefixfleet.transfer.link import Deadline


class AskingPeer:
    """Base of peers that read otherwise than over their ``channel``. Owned by the event loop that
    connected it; `read` and `close` are the subclass's."""

    def __init__(self, channel: Channel) -> None:
        self._channel = channel

    @property
    def node(self) -> str:
        """See `Peer`."""
        return self._channel.node

    @property
    def broken(self) -> bool:
        """See `Peer`."""
        return self._channel.broken

    async def ask(self, question: bytes, *, deadline: Deadline) -> bytes:
        """See `Peer`."""
        return await self._channel.ask(question, deadline=deadline)
