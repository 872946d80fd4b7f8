"""`DiskThreads`: the threads that wait for a disk, so that nobody else does.

One writes, in order; a few read. Blocks that were read are verified by who read them.
"""

import asyncio
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
    """Owned by an `SsdTier`. The writing thread owns ``files``, and ``wear_file`` where there is
    one; `close` ends them."""

    def __init__(self, files: BlockFiles, namespace: bytes, wear_file: WearFile | None) -> None:
        self._files = files
        self._namespace = namespace
        self._wear_file = wear_file
        self._writer = ThreadPoolExecutor(1, "ssd-write")
        self._readers = ThreadPoolExecutor(READ_THREADS, "ssd-read")

    async def recover(self) -> list[DiskBlock]:
        """What the disk holds, parents first. Raises `ConfigError`."""
        return await self._run(self._writer, self._files.recover)

    async def write(
        self, blocks: Sequence[tuple[DiskBlock, memoryview]], left_bytes: float
    ) -> None:
        """Commit whole slots; ``left_bytes`` of the wear budget are left. Raises `OSError`."""
        await self._run(self._writer, self._commit, blocks, left_bytes)

    async def read(self, slot: int, block: BlockHash, target: memoryview) -> None:
        """Fill ``target`` with a whole slot. Raises `OSError`, or `CorruptBlock` if it is not the
        block."""
        await self._run(self._readers, self._fill, slot, block, target)

    async def close(self) -> None:
        """Finish what is being written, then close the files; a disk that does not answer within
        `CLOSE_S` is left alone."""
        closing = asyncio.ensure_future(self._run(self._writer, self._files.close))
        if (await asyncio.wait({closing}, timeout=CLOSE_S))[0]:
            closing.result()
        else:
            log.error("ssd tier: the disk ended no write within %g s: left open", CLOSE_S)
        self._writer.shutdown(wait=False)
        self._readers.shutdown(wait=False)

    def _commit(self, blocks: Sequence[tuple[DiskBlock, memoryview]], left_bytes: float) -> None:
        if self._wear_file is not None:
            self._wear_file.write(left_bytes)  # first: a crash in between costs budget, not wear
        self._files.write(blocks)

    def _fill(self, slot: int, block: BlockHash, target: memoryview) -> None:
        self._files.read(slot, target)
        for shard in range(self._files.layout.shards):
            verify(target, self._files.layout, self._namespace, block, shard)

    @staticmethod
    async def _run(pool: ThreadPoolExecutor, call: Callable[..., _T], *arguments: object) -> _T:
        return await asyncio.get_running_loop().run_in_executor(pool, call, *arguments)
