"""Our end of `transfer.py`: the pulling process over each link, and its hand on the sending one."""

import json
import subprocess
import sys
import time
from pathlib import Path

from links import MAKERS, SECRET
from pulls import EPOCH, NAMESPACE, chain

from prefixfleet.transfer.pull import Puller
from tests.bench.transfer_peers import SIZES
from tests.bench.transfer_source import layout_of

PULL_S = 60.0


class Source:
    """The sending process."""

    def __init__(self, kinds):
        script = Path(__file__).with_name("transfer_source.py")
        self._process = subprocess.Popen(
            [sys.executable, str(script), *kinds],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self.told = json.loads(self._process.stdout.readline())

    def cpu_s(self):
        self._process.stdin.write("cpu\n")
        self._process.stdin.flush()
        return json.loads(self._process.stdout.readline())

    def close(self):
        self._process.communicate(timeout=30)


class Ours:
    """Pulls over one link into empty pools."""

    def __init__(self, kind, contacts, nodes):
        self._contacts = contacts
        self._nodes = nodes
        self._link = MAKERS[kind](node="target", secret=SECRET)
        self._pullers = {
            size: Puller(
                node.pool, node.segment, layout_of(size), links={self._link.name: self._link}
            )
            for size, node in nodes.items()
        }

    async def pull(self, size):
        node, hashes = self._nodes[size], chain(SIZES[size][1])
        result = await self._pullers[size].pull(
            self._contacts[size],
            namespace=NAMESPACE,
            epoch=EPOCH,
            parent=b"",
            hashes=hashes,
            deadline=time.monotonic() + PULL_S,
        )
        assert result.blocks == len(hashes), result
        node.evict(len(hashes))
        return result.seconds

    async def prove(self, expected):
        """Once before it is measured: the bytes are right, and connections are there."""
        for size, node in self._nodes.items():
            node.segment[:] = bytes(len(node.segment))
            await self.pull(size)
            assert bytes(node.segment) == bytes(expected[size]), size  # views compare slowly

    async def close(self):
        for puller in self._pullers.values():
            await puller.close()
        await self._link.close()
