"""A node that replicates, in a process of its own, told what to do line by line.

Usage: collective_host.py NAME MODE HOST FILE BLOCKS BLOCK_BYTES STALL_S [DEVICE]. Prints its
contact; then answers each line, a list of a word and arguments in JSON, with one line of JSON.
"""

import asyncio
import json
import mmap
import sys
import time
from pathlib import Path
from typing import Any

from eventually import until
from links import SECRET, soon
from pulls import EPOCH, NAMESPACE, PoolNode, chain

from prefixfleet.store.errors import PullFailed
from prefixfleet.store.heat import Heat
from prefixfleet.store.replication import Mode
from prefixfleet.store.slot import HEADER_BYTES, SlotLayout
from prefixfleet.transfer.collective import Replicator
from prefixfleet.transfer.collective_group import Member, Part
from prefixfleet.transfer.collective_send import Sender
from prefixfleet.transfer.collective_worker import CollectiveWorker
from prefixfleet.transfer.pull import Puller
from prefixfleet.transfer.tcp import TcpLink


class Host:
    """The node. Owned by the process."""

    def __init__(
        self,
        name: str,
        mode: str,
        host: str,
        file: str,
        blocks: int,
        size: int,
        stall_s: float,
        device: str,
    ) -> None:
        layout = SlotLayout(payload_bytes=size - HEADER_BYTES)
        self.chain = chain(blocks)
        self.node = PoolNode(
            name, slots=blocks, layout=layout, segment=_mapped(file, blocks * layout.slot_bytes)
        )
        self.link = TcpLink(node=name, secret=SECRET)
        self.host = host
        self.members: list[Member] = []
        self.worker = CollectiveWorker(Path(file), device)
        part = Part(
            pool=self.node.pool,
            segment=self.node.segment,
            layout=layout,
            namespace=NAMESPACE,
            node=name,
            host=host,
            worker=self.worker,
            stall_s=stall_s,
        )
        self.replicator = Replicator(
            part,
            mode=Mode(mode),
            link=self.link,
            members=lambda: self.members,
            clock=time.monotonic,
            heat=Heat(window_s=600, nodes=1),
        )
        self.node.server.replication = self.replicator
        links = {"tcp": self.link}
        self.puller = Puller(self.node.pool, self.node.segment, layout, links=links)

    async def run(self) -> None:
        self.replicator.open()
        await until(lambda: self.replicator.mode != "enforce" or self.worker.ready, 200)
        listener = await self.link.listen(self.host, self.node.segment, self.node.server)
        _say({"contact": listener.contact, "child": self.child()})
        while line := await asyncio.to_thread(sys.stdin.readline):
            word, *arguments = json.loads(line)
            _say(await getattr(self, word)(*arguments))
        await self.puller.close()
        await self.replicator.close()
        await listener.close()
        await self.link.close()

    def child(self) -> int:
        """Process of its part in collectives; 0 for none."""
        return self.worker.pid

    async def fill(self) -> dict[str, Any]:
        self.node.fill(self.chain)
        return {}

    async def meet(self, members: list[tuple[str, int, str]]) -> dict[str, Any]:
        self.members = [Member(*member) for member in members]
        return {}

    async def replicate(self) -> dict[str, Any]:
        self.replicator.replicate(self.chain)
        return {}

    async def pull(self, contact: str) -> dict[str, Any]:
        result = await self.puller.pull(
            {"tcp": contact},
            namespace=NAMESPACE,
            epoch=EPOCH,
            parent=b"",
            hashes=self.chain,
            deadline=soon(60),
        )
        return {"blocks": result.blocks, "failure": result.failure}

    async def evict(self) -> dict[str, Any]:
        self.node.evict(len(self.chain))
        return {}

    async def refused(self, member: tuple[str, int, str]) -> dict[str, Any]:
        """Why that node would not join a broadcast of ours."""
        sender = Sender(self.replicator.part, self.link)
        join = sender.invitation(Member(*member), self.chain, "group", "127.0.0.1:1", soon())
        try:
            await sender.ask(Member(*member), join, soon())
        except PullFailed as error:
            return {"reason": error.reason}
        return {"reason": ""}

    async def state(self) -> dict[str, Any]:
        """What is here, each block proved and compared; how the pool stands; what happened."""
        pool = self.node.pool.counts()
        return {
            "blocks": self.node.holds(self.chain),
            "reserved": pool.reserved + pool.quarantined,
            "counters": dict(self.replicator.part.counters),
            "at_rest": self.worker.ready and not self.replicator.taking_part,
            "child": self.child(),
        }

    async def matched(self) -> dict[str, Any]:
        return {"blocks": self.node.pool.match(self.chain)}


def _mapped(file: str, size_bytes: int) -> memoryview:
    with Path(file).open("w+b") as opened:
        opened.truncate(size_bytes)
        return memoryview(mmap.mmap(opened.fileno(), 0))


def _say(answer: dict[str, Any]) -> None:
    sys.stdout.write(json.dumps(answer) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    name, mode, host, file, blocks, size, stall_s, *device = sys.argv[1:]
    numbers = (int(blocks), int(size), float(stall_s))
    asyncio.run(Host(name, mode, host, file, *numbers, "".join(device)).run())
