"""A process that serves a segment of known bytes over one link, until its standard input ends.

Usage: link_source.py KIND BYTES. Prints {"contact": ...} when it is ready.
"""

import asyncio
import json
import sys

from links import MAKERS, SECRET, Echo, some_bytes


async def main(kind: str, size: str) -> None:
    link = MAKERS[kind](node="source", secret=SECRET)
    listener = await link.listen("127.0.0.1", some_bytes(int(size)), Echo())
    sys.stdout.write(json.dumps({"contact": listener.contact}) + "\n")
    sys.stdout.flush()
    await asyncio.to_thread(sys.stdin.read)
    await listener.close()
    await link.close()


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
