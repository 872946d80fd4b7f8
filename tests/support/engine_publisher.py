"""An engine's KV events on real ZeroMQ sockets, in vLLM's format: PUB, and ROUTER for replays."""

import asyncio
import time
from collections import deque
from collections.abc import Sequence
from typing import Any

import msgpack
import zmq
import zmq.asyncio

END = (-1).to_bytes(8, "big", signed=True)


class EnginePublisher:
    """One life of an engine. ``block_tokens`` tokens a block; hashes are counted up.

    Open it with ``async with``. ``keep`` batches can be replayed. A new life takes the ``ports``
    of the one before.
    """

    def __init__(
        self, block_tokens: int = 16, ports: tuple[int, int] = (0, 0), keep: int = 1_000
    ) -> None:
        self.block_tokens = block_tokens
        self.ports = ports
        self.sequence = 0
        self.names = 0
        self.replays = 0
        self.kept: deque[tuple[bytes, bytes]] = deque(maxlen=keep)

    async def __aenter__(self) -> "EnginePublisher":
        self._context = zmq.asyncio.Context()
        self._pub = self._context.socket(zmq.XPUB)  # PUB that tells of its subscribers
        self._pub.setsockopt(zmq.LINGER, 0)
        self._pub.bind(f"tcp://127.0.0.1:{self.ports[0] or '*'}")
        self._router = self._context.socket(zmq.ROUTER)
        self._router.setsockopt(zmq.LINGER, 0)
        self._router.bind(f"tcp://127.0.0.1:{self.ports[1] or '*'}")
        self.events = self._pub.get_string(zmq.LAST_ENDPOINT).rstrip("\0")
        self.replay = self._router.get_string(zmq.LAST_ENDPOINT).rstrip("\0")
        self.ports = (_port(self.events), _port(self.replay))
        self._serving = asyncio.create_task(self._serve_replays())
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.stop()

    async def stop(self) -> None:
        """End this life, with its sockets."""
        self._serving.cancel()
        await asyncio.gather(self._serving, return_exceptions=True)
        self._context.destroy(linger=0)

    async def heard(self) -> None:
        """Wait until somebody subscribed."""
        async with asyncio.timeout(30):
            await self._pub.recv()

    async def publish(self, *events: Any, lost: bool = False, payload: bytes = b"") -> None:
        """One batch; ``lost`` on its way to subscribers, though it can be replayed."""
        payload = payload or msgpack.packb([time.time(), list(events), 0])
        numbered = (self.sequence.to_bytes(8, "big"), payload)
        self.sequence += 1
        self.kept.append(numbered)
        if not lost:
            await self._pub.send_multipart([b"", *numbered])

    def stored(self, token_ids: Sequence[int], **more: Any) -> dict[str, Any]:
        """The event of a prompt's full blocks, stored from the first on."""
        count = len(token_ids) // self.block_tokens
        names = list(range(self.names, self.names + count))
        self.names += count
        return {
            "type": "BlockStored",
            "block_hashes": names,
            "parent_block_hash": None,
            "token_ids": list(token_ids[: count * self.block_tokens]),
            "block_size": self.block_tokens,
            "lora_id": None,
            "medium": "GPU",
        } | more

    async def _serve_replays(self) -> None:
        while True:
            client, _, start = await self._router.recv_multipart()
            self.replays += 1
            for sequence, payload in list(self.kept):
                if sequence >= start:
                    await self._router.send_multipart([client, b"", b"", sequence, payload])
            await self._router.send_multipart([client, b"", b"", END, b""])


def removed(*names: int) -> dict[str, Any]:
    """The event of one copy of each block that is gone."""
    return {"type": "BlockRemoved", "block_hashes": list(names), "medium": "GPU"}


def _port(endpoint: str) -> int:
    return int(endpoint.rsplit(":", 1)[1])
