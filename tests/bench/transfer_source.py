"""The sending process of `transfer.py`: pools of known blocks over every link and a raw socket.

Usage: transfer_source.py LINK... Prints one JSON object when it is ready, then answers each line
"cpu" with the CPU seconds that it has used, until its standard input ends.
"""

import asyncio
import json
import socket
import sys
import threading
import time
from pathlib import Path

sys.path += [str(Path(__file__).parents[2]), str(Path(__file__).parents[1] / "support")]

import uvloop
from links import MAKERS, SECRET
from pulls import PoolNode, chain

from prefixfleet.store.populate import Populating
from prefixfleet.store.slot import HEADER_BYTES, SlotLayout
from tests.bench.transfer_peers import SIZES


def layout_of(size):
    """A slot is exactly one block: what lies beside the payload counts as ours."""
    return SlotLayout(payload_bytes=SIZES[size][0] - HEADER_BYTES)


def pool_node(size, name):
    """An empty pool, its pages in place as a daemon has them."""
    node = PoolNode(name, slots=SIZES[size][1], layout=layout_of(size))
    populating = Populating(node.segment, huge=True)
    while populating.running:
        time.sleep(0.01)
    return node


def filled_node(size, name="source"):
    node = pool_node(size, name)
    node.fill(chain(SIZES[size][1]))
    return node


async def listeners_of(kind, nodes):
    """Contacts by size. Every size has a pool, so a listener, of its own."""
    opened, contacts = [], {}
    for size, node in nodes.items():
        link = MAKERS[kind](node=node.name, secret=SECRET)
        listener = await link.listen("127.0.0.1", node.segment, node.server)
        opened.append((listener, link))
        contacts[size] = {link.name: listener.contact}
    return opened, contacts


class RawSource(threading.Thread):
    """Sends a pool's blocks, one blocking call each, to whoever asks for its size by name."""

    def __init__(self, nodes):
        super().__init__(daemon=True)
        self._nodes = nodes
        self._listening = socket.create_server(("127.0.0.1", 0))
        self.port = self._listening.getsockname()[1]

    def run(self):
        sock, _ = self._listening.accept()
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        while question := sock.recv(16):
            node = self._nodes[question.decode().strip()]
            for slot in range(node.pool.num_slots):
                sock.sendall(node.slot(slot))


async def main(*kinds):
    nodes = {size: filled_node(size) for size in SIZES}
    opened, contacts = [], {}
    for kind in kinds:
        more, contacts[kind] = await listeners_of(kind, nodes)
        opened += more
    raw = RawSource(nodes)
    raw.start()
    print(json.dumps({"contacts": contacts, "raw": raw.port}), flush=True)
    while line := await asyncio.to_thread(sys.stdin.readline):
        assert line == "cpu\n"
        print(json.dumps(time.process_time()), flush=True)
    for listener, link in opened:
        await listener.close()
        await link.close()


if __name__ == "__main__":
    uvloop.run(main(*sys.argv[1:]))
