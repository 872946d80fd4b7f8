"""Peers that do not keep to the protocol: raw sockets beside the real thing."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass

from links import SECRET

from prefixfleet.transfer import wire
from prefixfleet.transfer.auth import Handshake, nonce
from prefixfleet.transfer.contact import parse_contact
from prefixfleet.transfer.wire import Kind


@dataclass
class Raw:
    """One raw connection, and frames over it."""

    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter

    async def send(self, kind: Kind, body: bytes = b"", id: int = 0) -> None:
        self.writer.write(wire.frame_header(kind, body, id) + body)
        await self.writer.drain()

    async def receive(self) -> tuple[wire.Header, bytes]:
        """The next frame. Raises `asyncio.IncompleteReadError` at the end."""
        async with asyncio.timeout(20):
            header = wire.decode_header(await self.reader.readexactly(wire.HEADER.size))
            return header, await self.reader.readexactly(header.length)

    async def ended(self) -> bool:
        """Whether the other side drops the connection, soon."""
        async with asyncio.timeout(20):
            with contextlib.suppress(ConnectionError):
                while await self.reader.read(65536):
                    pass
            return True


@contextlib.asynccontextmanager
async def raw_caller(contact: str, link: str = "tcp") -> AsyncIterator[Raw]:
    """A connection to a listener that has said nothing yet."""
    raw = Raw(*await asyncio.open_connection(*parse_contact(link, contact)))
    try:
        yield raw
    finally:
        raw.writer.close()
        with contextlib.suppress(ConnectionError):
            await raw.writer.wait_closed()


async def introduce(raw: Raw, secret: bytes = SECRET, link: str = "tcp") -> None:
    """The caller's half of the handshake."""
    hello = wire.Hello("hostile", link, nonce())
    await raw.send(Kind.HELLO, wire.pack(hello))
    _, body = await raw.receive()
    challenge: wire.Challenge = wire.unpack(body, wire.Challenge)
    proof = Handshake(secret, hello, challenge).proof("caller")
    await raw.send(Kind.PROOF, wire.pack(wire.Proof(proof)))


async def welcome(raw: Raw, secret: bytes = SECRET, attachment: bytes = b"") -> None:
    """The listener's half of the handshake."""
    _, body = await raw.receive()
    hello: wire.Hello = wire.unpack(body, wire.Hello)
    challenge = wire.Challenge("hostile", nonce())
    await raw.send(Kind.CHALLENGE, wire.pack(challenge))
    await raw.receive()
    proven = Handshake(secret, hello, challenge).proof("listener", attachment)
    await raw.send(Kind.WELCOME, wire.pack(wire.Welcome(proven, attachment)))


@contextlib.asynccontextmanager
async def raw_listener(behave: Callable[[Raw], Awaitable[None]]) -> AsyncIterator[str]:
    """A listener that treats each connection as told, then keeps it open. Yields its contact."""
    release = asyncio.Event()
    tasks: set[asyncio.Task[None]] = set()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        tasks.add(task)
        with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError):
            await behave(Raw(reader, writer))
            await release.wait()
        writer.close()
        with contextlib.suppress(ConnectionError):
            await writer.wait_closed()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    try:
        yield f"tcp://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    finally:
        release.set()
        server.close()
        await asyncio.gather(*tasks)
        await server.wait_closed()
