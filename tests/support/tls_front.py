"""TLS in front of a server that speaks none, for a client that insists on it."""

import asyncio
import contextlib
import ssl
from collections.abc import AsyncIterator

from certificates import Pair


@contextlib.asynccontextmanager
async def tls_front(
    pair: Pair, port: int, ports: dict[int, int] | None = None
) -> AsyncIterator[int]:
    """The port of a listener that passes on to ``port`` of this machine what it decrypts.

    ``ports`` are numbers of equally many digits that answers name others by: what a Sentinel says
    of servers is true for those in front of them.
    """
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(pair.cert, pair.key)
    swaps = [(str(old).encode(), str(new).encode()) for old, new in (ports or {}).items()]
    assert all(len(old) == len(new) for old, new in swaps)
    connections: set[asyncio.Task[None]] = set()

    async def passed(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while data := await reader.read(1 << 16):
            for old, new in swaps:
                data = data.replace(old, new)
            writer.write(data)
            await writer.drain()
        writer.close()

    async def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        connections.add(task)
        task.add_done_callback(connections.discard)
        ends = [writer]
        try:
            with contextlib.suppress(OSError):  # either end may go at any moment
                inner, outer = await asyncio.open_connection("127.0.0.1", port)
                ends.append(outer)
                await asyncio.gather(passed(reader, outer), passed(inner, writer))
        finally:
            for end in ends:
                end.transport.abort()

    server = await asyncio.start_server(accept, "127.0.0.1", 0, ssl=context)
    try:
        yield server.sockets[0].getsockname()[1]
    finally:
        server.close()
        for connection in list(connections):
            connection.cancel()
        await asyncio.gather(*connections, return_exceptions=True)
