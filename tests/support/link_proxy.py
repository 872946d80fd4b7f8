"""A TCP proxy that a test can cut, freeze and slow down."""

import asyncio
import contextlib
from collections.abc import Callable

CHUNK_BYTES = 16 * 1024


class LinkProxy:
    """Listens on a port of its own and passes bytes on to ``target()``, a port. Owned by its loop.

    ``bytes_per_s`` 0 is as fast as it goes; ``frozen`` lets nothing through and refuses nothing.
    """

    def __init__(self, target: Callable[[], int]) -> None:
        self._target = target
        self._server: asyncio.Server | None = None
        self._pipes: set[asyncio.Task[None]] = set()
        self._writers: set[asyncio.StreamWriter] = set()
        self._flowing = asyncio.Event()
        self._flowing.set()
        self.refusing = False
        self.bytes_per_s = 0.0
        self.port = 0

    async def open(self) -> "LinkProxy":
        self._server = await asyncio.start_server(self._accept, "127.0.0.1", 0)
        self.port = self._server.sockets[0].getsockname()[1]
        return self

    def heal(self) -> None:
        self.refusing, self.bytes_per_s = False, 0.0
        self._flowing.set()

    def freeze(self) -> None:
        self._flowing.clear()

    def cut(self) -> None:
        """Reset every connection, and refuse new ones until `heal`."""
        self.refusing = True
        for writer in list(self._writers):
            writer.transport.abort()

    async def close(self) -> None:
        assert self._server is not None
        self._server.close()
        self.heal()
        self.cut()
        for pipe in list(self._pipes):
            pipe.cancel()
        await asyncio.gather(*self._pipes, return_exceptions=True)

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._pipes.add(task)
        task.add_done_callback(self._pipes.discard)
        self._writers.add(writer)
        try:
            if self.refusing:
                return
            onward = await asyncio.open_connection("127.0.0.1", self._target())
            self._writers.add(onward[1])
            try:
                await asyncio.gather(self._pass(reader, onward[1]), self._pass(onward[0], writer))
            finally:
                onward[1].transport.abort()
                self._writers.discard(onward[1])
        except (OSError, ValueError):
            return
        finally:
            writer.transport.abort()
            self._writers.discard(writer)

    async def _pass(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while data := await reader.read(CHUNK_BYTES):
            await self._flowing.wait()
            if self.bytes_per_s:
                await asyncio.sleep(len(data) / self.bytes_per_s)
            writer.write(data)
            await writer.drain()
        with contextlib.suppress(OSError):
            writer.write_eof()
