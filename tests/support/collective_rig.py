"""Nodes that replicate, each a process of its own on loopback, for tests and the bench."""

import asyncio
import contextlib
import json
import os
import signal
import sys
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any, Self

from eventually import until
from pulls import EPOCH

SCRIPT = Path(__file__).with_name("collective_host.py")
ANSWER_S = 90.0


class Node:
    """One of them. Owned by the test."""

    def __init__(self, name: str, file: Path, process: asyncio.subprocess.Process) -> None:
        self.name = name
        self.file = file
        self.contact = ""
        self.child = 0
        self._process = process

    async def up(self) -> None:
        """Wait for its first word."""
        told = await self._answer()
        self.contact, self.child = told["contact"], told["child"]

    async def do(self, word: str, *arguments: Any) -> dict[str, Any]:
        """One command and its answer."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps([word, *arguments]).encode() + b"\n")
        return await self._answer()

    async def blocks(self) -> int:
        """Leading blocks that are there, proved and compared."""
        return int((await self.do("state"))["blocks"])

    @property
    def member(self) -> tuple[str, int, str]:
        """How others know it."""
        return self.name, EPOCH, self.contact

    def kill(self) -> None:
        """kill -9 to the node and to its child, as a host that dies."""
        for pid in self._pids():
            os.kill(pid, signal.SIGKILL)

    def freeze(self) -> None:
        """Its child does nothing any more, and holds its connections open."""
        os.kill(self.child, signal.SIGSTOP)

    async def end(self) -> None:
        """Whatever its state."""
        for pid in self._pids():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        await self._process.communicate()

    def _pids(self) -> list[int]:
        return [self._process.pid, *([self.child] if self.child else [])]

    async def _answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        async with asyncio.timeout(ANSWER_S):
            line = await self._process.stdout.readline()
        answer: dict[str, Any] = json.loads(line)
        return answer


class Nodes:
    """Nodes "n0" upward; the first has the chain, all know each other."""

    def __init__(self, nodes: Sequence[Node]) -> None:
        self.all = nodes
        self.source, *self.others = nodes

    @classmethod
    @contextlib.asynccontextmanager
    async def of(
        cls,
        folder: Path,
        *modes: str,
        blocks: int = 8,
        block_bytes: int = 65536,
        stall_s: float = 3.0,
        devices: Sequence[str] = (),
    ) -> AsyncIterator[Self]:
        """One of each mode."""
        nodes: list[Node] = []
        try:
            for number, mode in enumerate(modes):
                name, file = f"n{number}", folder / f"n{number}"
                process = await asyncio.create_subprocess_exec(
                    *(sys.executable, str(SCRIPT), name, mode, "127.0.0.1", str(file)),
                    *map(str, (blocks, block_bytes, stall_s)),
                    *devices[number : number + 1],
                    stdin=asyncio.subprocess.PIPE,
                    stdout=asyncio.subprocess.PIPE,
                )
                nodes.append(Node(name, file, process))
            await asyncio.gather(*(node.up() for node in nodes))
            rig = cls(nodes)
            await rig.source.do("fill")
            for node in nodes:
                await node.do("meet", [other.member for other in nodes])
            yield rig
        finally:
            await asyncio.gather(*(node.end() for node in nodes))

    async def counted(self, node: Node, *names: str) -> dict[str, Any]:
        """The node's state, once one of these counters has moved and it is at rest."""

        async def counted() -> dict[str, Any]:
            state = await node.do("state")
            done = any(state["counters"].get(name) for name in names)
            return state if done and state["at_rest"] and not state["reserved"] else {}

        state: dict[str, Any] = await until(counted, 90)
        return state
