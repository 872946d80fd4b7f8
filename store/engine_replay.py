"""Past KV events of an engine, asked for over ZeroMQ.

The engine keeps its last batches (vLLM 10,000 by default) and answers on a ROUTER socket: the
question is a sequence, the answer every batch from there on that it still has, then an end mark.
"""

import asyncio
import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

import zmq
import zmq.asyncio

from prefixfleet.store.engine_events import EventBatch, decode_batch
from prefixfleet.store.errors import ProtocolError

REPLAY_LIMIT_S = 10.0
"""An engine answers between two steps; what takes longer is lost, or has no replay socket."""
MAX_REPLAYED = 100_000  # ten times vLLM's own buffer
MAX_REPLAYED_BYTES = 512 * 1024 * 1024
"""vLLM's own buffer of 10,000 batches, each of a step that computed 8,192 tokens."""
HELD_UP_BYTES = 64 * 1024
"""Decoded at once, in a few ms; more goes to a thread, or others would wait."""
SEQUENCE_BYTES = 8
_END = (-1).to_bytes(8, "big", signed=True)

T = TypeVar("T")


class ReplayFailed(Exception):
    """The past cannot be had; says why."""


@dataclass(frozen=True, slots=True)
class Message:
    """A batch as it came: decoded, it takes seven times the room."""

    frames: tuple[bytes, bytes]

    @property
    def sequence(self) -> int:
        """Its number."""
        return int.from_bytes(self.frames[0], "big")

    async def batch(self) -> EventBatch:
        """What it says. Raises `ProtocolError`."""
        return await self._unhurried(decode_batch)

    async def digest(self) -> bytes:
        """Names it: it covers the time at which it was published."""
        return await self._unhurried(_digest)

    async def _unhurried(self, work: Callable[[Sequence[bytes]], T]) -> T:
        if len(self.frames[1]) <= HELD_UP_BYTES:
            return work(self.frames)
        return await asyncio.to_thread(work, self.frames)


def read_message(frames: Sequence[bytes]) -> Message:
    """One published message, not decoded yet. Raises `ProtocolError`."""
    if not 2 <= len(frames) <= 3 or len(frames[-2]) != SEQUENCE_BYTES:
        raise ProtocolError(f"engine events: got {len(frames)} frames, expected topic, seq, batch")
    return Message((frames[-2], frames[-1]))


def _digest(frames: Sequence[bytes]) -> bytes:
    return hashlib.sha256(b"".join(frames)).digest()


async def replay(context: zmq.asyncio.Context, endpoint: str, start: int) -> list[Message]:
    """Batches from sequence ``start`` on that the engine still has. Raises `ReplayFailed`."""
    if not endpoint:
        raise ReplayFailed("no endpoint is configured for it")
    socket = context.socket(zmq.DEALER)  # a REQ socket takes one answer only
    try:
        socket.setsockopt(zmq.LINGER, 0)
        socket.connect(endpoint)
        async with asyncio.timeout(REPLAY_LIMIT_S):
            await socket.send_multipart([b"", start.to_bytes(8, "big")])
            return await _until_end(socket)
    except (TimeoutError, zmq.ZMQError, ProtocolError) as error:
        raise ReplayFailed(f"{endpoint}: {type(error).__name__}: {error}") from error
    finally:
        socket.close()


async def _until_end(socket: zmq.asyncio.Socket) -> list[Message]:
    messages: list[Message] = []
    size = 0
    while len(messages) < MAX_REPLAYED:
        frames = await socket.recv_multipart()
        if len(frames) < 3:
            raise ReplayFailed(f"got {len(frames)} frames, expected at least 3")
        if frames[-2] == _END:
            return messages
        messages.append(read_message(frames[-2:]))  # older engines leave the topic out
        size += len(frames[-1])
        if size > MAX_REPLAYED_BYTES:
            raise ReplayFailed(f"more than {MAX_REPLAYED_BYTES} bytes")
    raise ReplayFailed(f"more than {MAX_REPLAYED} batches")
