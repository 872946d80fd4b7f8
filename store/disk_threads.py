"""`DiskThreads`: the threads that wait for a disk, so that nobody else does.

One writes, in order, for all namespaces of the disk; a few read. Blocks that were read are
verified by who read them.
"""

import asyncio
import contextlib
import logging
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from prefixfleet.store.block_files import BlockFiles
from prefixfleet.store.bucket_file import DiskBlock
from prefixfleet.store.chain import BlockHash
from prefixfleet.store.slot import verify
from prefixfleet.store.wear_file import WearFile

log = logging.getLogger(__name__)

READ_THREADS = 4
CLOSE_S = 10.0

_T = TypeVar("_T")


class DiskThreads:
    """Owned by who opened the disk. The writing thread owns all files on it, and ``wear_file``
    where there is one; `close` ends them."""

    def __init__(self, wear_file: WearFile | None) -> None:
        self._wear_file = wear_file
        self._writer = ThreadPoolExecutor(1, "ssd-write")
        self._readers = ThreadPoolExecutor(READ_THREADS, "ssd-read")

    async def in_order(self, call: Callable[..., _T], *arguments: object) -> _T:
        """Have the writing thread do this, after all that it was asked before."""
        return await self._run(self._writer, call, *arguments)

    async def write(
        self,
        files: BlockFiles,
        blocks: Sequence[tuple[DiskBlock, memoryview]],
        left_bytes: float,
    ) -> None:
        """Commit whole slots; ``left_bytes`` of the wear budget are left. Raises `OSError`."""
        await self.in_order(self._commit, files, blocks, left_bytes)

    async def read(
        self, files: BlockFiles, namespace: bytes, slot: int, block: BlockHash, target: memoryview
    ) -> None:
        """Fill ``target`` with a whole slot. Raises `OSError`, or `CorruptBlock` if it is not the
        block."""
        await self._run(self._readers, _fill, files, namespace, slot, block, target)

    async def close_files(self, files: BlockFiles) -> None:
        """Finish what is being written, then close them; a disk that does not answer within
        `CLOSE_S` is left alone."""
        closing = asyncio.ensure_future(self.in_order(files.close))
        if (await asyncio.wait({closing}, timeout=CLOSE_S))[0]:
            closing.result()
        else:
            log.error("ssd tier: the disk ended no write within %g s: left open", CLOSE_S)

    def close_later(self, files: BlockFiles) -> None:
        """Close them after all that was asked before; nobody waits for it."""
        with contextlib.suppress(RuntimeError):  # `close` was called: the process ends
            self._writer.submit(files.close)

    def close(self) -> None:
        """Take nothing more."""
        self._writer.shutdown(wait=False)
        self._readers.shutdown(wait=False)

    def _commit(
        self,
        files: BlockFiles,
        blocks: Sequence[tuple[DiskBlock, memoryview]],
        left_bytes: float,
    ) -> None:
        if self._wear_file is not None:
            self._wear_file.write(left_bytes)  # first: a crash in between costs budget, not wear
        files.write(blocks)

    @staticmethod
    async def _run(pool: ThreadPoolExecutor, call: Callable[..., _T], *arguments: object) -> _T:
        return await asyncio.get_running_loop().run_in_executor(pool, call, *arguments)


def _fill(
    files: BlockFiles, namespace: bytes, slot: int, block: BlockHash, target: memoryview
) -> None:
    files.read(slot, target)
    for shard in range(files.layout.shards):
        verify(target, files.layout, namespace, block, shard)
