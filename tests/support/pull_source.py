"""A process that serves the blocks of `pulls.chain` over one link, until its input ends.

Usage: pull_source.py KIND BLOCKS [HOST]. Prints {"contacts": ...} when it is ready.
"""

import asyncio
import json
import sys

from links import MAKERS, SECRET
from pulls import PoolNode, chain


async def main(kind: str, blocks: str, host: str = "127.0.0.1") -> None:
    node = PoolNode("source", slots=int(blocks))
    node.fill(chain(int(blocks)))
    link = MAKERS[kind](node=node.name, secret=SECRET)
    listener = await link.listen(host, node.segment, node.server)
    sys.stdout.write(json.dumps({"contacts": {link.name: listener.contact}}) + "\n")
    sys.stdout.flush()
    await asyncio.to_thread(sys.stdin.read)
    await listener.close()
    await link.close()


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
