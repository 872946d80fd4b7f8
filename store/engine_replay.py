"""Past KV events of an engine, asked for over ZeroMQ.

The engine keeps its last batches (vLLM 10,000 by default) and answers on a ROUTER socket: the
question is a sequence, the answer every batch from there on that it still has, then an end mark.
"""

import asyncio
import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

import zmq
import zmq.asyncio

from prefixfleet.store.engine_events import EventBatch, decode_batch
from prefixfleet.store.errors import ProtocolError

REPLAY_LIMIT_S = 10.0
"""An engine answers between two steps; what takes longer is lost, or has no replay socket."""
MAX_REPLAYED = 100_000  # ten times vLLM's own buffer
_END = (-1).to_bytes(8, "big", signed=True)


class ReplayFailed(Exception):
    """The past cannot be had; says why."""


@dataclass(frozen=True, slots=True)
class Message:
    """A batch, and a digest that names it: it covers the time at which it was published."""

    batch: EventBatch
    digest: bytes


def read_message(frames: Sequence[bytes]) -> Message:
    """One published message. Raises `ProtocolError`."""
    batch = decode_batch(frames)
    return Message(batch, hashlib.sha256(frames[-2] + frames[-1]).digest())


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
    while len(messages) < MAX_REPLAYED:
        frames = await socket.recv_multipart()
        if len(frames) < 3:
            raise ReplayFailed(f"got {len(frames)} frames, expected at least 3")
        if frames[-2] == _END:
            return messages
        messages.append(read_message(frames[-2:]))  # older engines leave the topic out
    raise ReplayFailed(f"more than {MAX_REPLAYED} batches")
