"""What is read of the index in Redis by its keys, without the Lua library: who holds what, in
pages, and the events, as they come.

No read of it is atomic with another one. Every reply is proved; see `redis_replies`.
"""

from prefixfleet.store import redis_replies
from prefixfleet.store.index import IndexEvent, StreamGap
from prefixfleet.store.redis_functions import RedisFunctions
from prefixfleet.store.redis_replies import Position, sound

HEADS = 64
"""Segments whose holders are read together, about."""
PAGE_FIELDS = 1000
FOLLOW_BLOCK_S = 1.0
READ_EVENTS = 64


async def read_holders(functions: RedisFunctions, live: int) -> dict[bytes, int]:
    """Every block that a node of the bitmap ``live`` holds, with the bitmap of its holders.

    Raises:
        IndexUnavailable: the server does not answer, or not as a sound one does.
    """
    prefix = functions.prefix
    holders: dict[bytes, int] = {}
    cursor = b"0"
    while True:
        reply = await functions.command("SSCAN", prefix + b"heads", cursor, "COUNT", HEADS)
        with sound("SSCAN"):
            cursor, heads = reply
            pages = [(prefix + b"s:" + head, b"0") for head in heads]
        while pages:
            replies = await functions.commands(
                ("HSCAN", key, at, "COUNT", PAGE_FIELDS) for key, at in pages
            )
            with sound("HSCAN"):
                for _, fields in replies:
                    redis_replies.add_holders(holders, fields, live)
                places = zip(pages, replies, strict=True)
                pages = [(key, at) for (key, _), (at, _) in places if at != b"0"]
        if cursor == b"0":
            return holders


async def read_events(
    functions: RedisFunctions, position: Position
) -> list[tuple[bytes, IndexEvent]]:
    """The next events after ``position`` with their ids; none if none came in `FOLLOW_BLOCK_S`.

    Raises:
        StreamGap: the stream holds what is none of ours.
        IndexUnavailable: the server does not answer.
    """
    stream = (functions.prefix + b"events", redis_replies.format_position(position))
    reply = await functions.command(
        *("XREAD", "COUNT", READ_EVENTS, "BLOCK", int(FOLLOW_BLOCK_S * 1000)),
        *("STREAMS", *stream),
        timeout_s=FOLLOW_BLOCK_S + functions.timeout_s,
    )
    if reply is None:
        return []
    try:
        return [(i, redis_replies.as_event(entry)) for i, entry in reply[0][1]]
    except redis_replies.UNSOUND as error:
        raise StreamGap(f"the event stream holds what is none of ours: {error}") from error


async def is_ahead(functions: RedisFunctions, position: Position) -> bool:
    """Whether the server has events after ``position``.

    Raises:
        StreamGap: it lost those that we have read.
        IndexUnavailable: it does not answer, or not as a sound one does.
    """
    key = functions.prefix + b"meta"
    reply = await functions.command("HMGET", key, "generation", "events")
    with sound("HMGET"):
        generation, number = (int(value or 0) for value in reply)
    if position[0] not in (0, generation):
        raise StreamGap(f"the index began anew: generation {generation}, not {position[0]}")
    if position[0] and number < position[1]:
        raise StreamGap(f"the server has {number} events, we have read {position[1]}")
    return number > position[1]
