"""Links of every kind for tests: in one process, and with a source in a process of its own."""

import asyncio
import contextlib
import hashlib
import json
import os
import signal
import sys
import tempfile
import time
import weakref
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path
from typing import Any, Self

import pytest

from prefixfleet.store.mapping import map_shared
from prefixfleet.transfer.inproc import InprocLink, InprocNetwork
from prefixfleet.transfer.link import Caller, Link, Listener, Peer, Range, Service
from prefixfleet.transfer.shm import ShmLink
from prefixfleet.transfer.tcp import TcpLink
from prefixfleet.transfer.ucx import UcxLink
from prefixfleet.transfer.ucx_binding import available

SHARED_MEMORY = "/dev/shm"
FILES = "prefixfleet-test-"
SECRET = b"the same on all hosts"
MAKERS: dict[str, Callable[..., Link]] = {
    "tcp": TcpLink,
    "shm": ShmLink,
    "ucx": UcxLink,
    "ucx-tags": lambda **options: UcxLink(tags=True, **options),
    "ucx-py": lambda **options: UcxLink(binding="ucp", **options),
}


def _needs(binding: str, *values: str) -> Any:
    absent = f"the Python binding {binding} of UCX is not installed"
    return pytest.param(
        *values, marks=pytest.mark.skipif(binding not in available(), reason=absent)
    )


NETWORK_KINDS = [
    "tcp",
    "shm",
    _needs("ucxx", "ucx"),
    _needs("ucxx", "ucx-tags"),
    _needs("ucp", "ucx-py"),
]
KINDS = ["inproc", *NETWORK_KINDS]


def soon(seconds: float = 20.0) -> float:
    """A deadline that a correct link meets, whatever else the machine does."""
    return time.monotonic() + seconds


def shared_memory(count: int) -> memoryview:
    """Zeros in a private file of shared memory, as a pool is; the file goes with its last view."""
    fd, path = tempfile.mkstemp(prefix=f"{FILES}{os.getpid()}-", dir=SHARED_MEMORY)
    os.posix_fallocate(fd, 0, count)
    memory = map_shared(fd, count)
    os.close(fd)
    weakref.finalize(memory.obj, Path(path).unlink, missing_ok=True)
    return memory


def some_bytes(count: int) -> memoryview:
    """The same bytes each time, no part of which looks like another; a writable view of a file
    in shared memory."""
    view = shared_memory(count)
    view[:] = hashlib.shake_128(b"segment").digest(count)
    return view


async def read(
    peer: Peer,
    ranges: Sequence[Range],
    targets: Sequence[memoryview] | None = None,
    deadline: float | None = None,
) -> Sequence[memoryview]:
    """The bytes of the ranges, in the targets or in new ones."""
    if targets is None:
        targets = [memoryview(bytearray(part.length)) for part in ranges]
    await peer.read(ranges, targets, deadline=soon() if deadline is None else deadline)
    return targets


class Echo:
    """A service that answers with the question, and says who came and went."""

    def __init__(self) -> None:
        self.asked: list[tuple[Caller, bytes]] = []
        self.gone: asyncio.Queue[Caller] = asyncio.Queue()
        self.granting = True

    async def answer(self, caller: Caller, question: bytes) -> bytes:
        self.asked.append((caller, question))
        if question == b"fail":
            raise ZeroDivisionError("a bug in a service")
        if question == b"wait":
            await asyncio.Event().wait()
        return b"re:" + question if len(question) < 100 else question

    def grants(self, caller: Caller, part: Range) -> bool:
        return self.granting

    def disconnected(self, caller: Caller) -> None:
        self.gone.put_nowait(caller)


class Rig:
    """Makes links of one kind and closes all they opened."""

    def __init__(self, kind: str) -> None:
        self.kind = kind
        self.network = InprocNetwork()
        self._stack = contextlib.AsyncExitStack()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._stack.aclose()

    def scheme(self) -> str:
        """What contacts of this kind begin with."""
        link = self.link("any")
        return link.scheme if isinstance(link, ShmLink) else link.name

    def link(self, node: str, secret: bytes = SECRET, **options: Any) -> Link:
        """A link of the rig's kind."""
        link: Link
        if self.kind == "inproc":
            link = InprocLink(self.network, node=node, secret=secret)
        else:
            link = MAKERS[self.kind](node=node, secret=secret, **options)
        self._stack.push_async_callback(link.close)
        return link

    async def listen(
        self, link: Link, segment: memoryview, service: Service, host: str = "127.0.0.1"
    ) -> Listener:
        """A listener that is closed at the end."""
        listener = await link.listen(host, segment, service)
        self._stack.push_async_callback(listener.close)
        return listener

    async def connect(self, link: Link, contact: str) -> Peer:
        """A peer that is closed at the end."""
        peer = await link.connect(contact, deadline=soon())
        self._stack.push_async_callback(peer.close)
        return peer

    async def pair(self, segment: memoryview, service: Service) -> tuple[Listener, Peer]:
        """A listener of node "a" and a peer connected to it from node "b"."""
        listener = await self.listen(self.link("a"), segment, service)
        return listener, await self.connect(self.link("b"), listener.contact)


class Source:
    """A process that prints one JSON object when it is ready. Kill, freeze and thaw it."""

    def __init__(self, process: asyncio.subprocess.Process, told: dict[str, Any]) -> None:
        self.told = told
        self._process = process

    @classmethod
    @contextlib.asynccontextmanager
    async def of(cls, script: str, *arguments: object) -> AsyncIterator[Self]:
        """``script`` of this folder running; ended at the end, whatever its state."""
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            str(Path(__file__).with_name(script)),
            *map(str, arguments),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
        )
        assert process.stdout is not None
        assert process.stdin is not None
        try:
            async with asyncio.timeout(60):
                line = await process.stdout.readline()
            yield cls(process, json.loads(line))
        finally:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            await process.communicate()
            _remove_files(process.pid)

    def send(self, number: int) -> None:
        os.kill(self._process.pid, number)

    async def kill(self) -> None:
        """kill -9, and wait until it is gone."""
        self.send(signal.SIGKILL)
        await self._process.wait()

    def freeze(self) -> None:
        self.send(signal.SIGSTOP)

    def thaw(self) -> None:
        self.send(signal.SIGCONT)


def _remove_files(pid: int) -> None:
    """What a killed process left in shared memory."""
    for left in Path(SHARED_MEMORY).glob(f"{FILES}{pid}-*"):
        left.unlink()


def link_source(kind: str, size: int) -> contextlib.AbstractAsyncContextManager[Source]:
    """A process that serves ``some_bytes(size)`` over a link of this kind."""
    return Source.of("link_source.py", kind, size)
