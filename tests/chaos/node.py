"""A node daemon of a chaos run, as a process: the real one, reached by its peers through a proxy.

Usage: node.py FOLDER PROXY_PORT SKEW_FILE; settings from the environment. Prints one line of JSON
when it is up. On SIGUSR1 it proves its own books and writes what it found to FOLDER/NAME.check.
"""

import asyncio
import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "support"))

from skewed_clock import install

if __name__ == "__main__":
    install(Path(sys.argv[3]))  # before anything keeps the true clock

from prefixfleet.cluster.links import Links
from prefixfleet.cluster.node import NodeDaemon
from prefixfleet.cluster.settings import NodeSettings
from prefixfleet.store.redis_index import RedisIndex
from prefixfleet.store.settings import FleetSettings
from prefixfleet.transfer.tcp import TcpLink


class ProxiedTcp(TcpLink):
    """The TCP link, whose listener is named by the proxy in front of it."""

    def __init__(self, folder: Path, port: int, **options: Any) -> None:
        super().__init__(**options)
        self._file = folder / f"{options['node']}.port"
        self._proxy = port

    async def listen(self, host: str, segment: memoryview, service: Any) -> Any:
        acceptor = await super().listen(host, segment, service)
        self._file.write_text(acceptor.contact.rsplit(":", 1)[1])
        acceptor.contact = f"tcp://127.0.0.1:{self._proxy}"
        return acceptor


def books(daemon: NodeDaemon) -> dict[str, Any]:
    """The pool's books, proved; and everything that somebody still holds."""
    pool = next(iter(daemon._opener.pools.values()), None)
    found: dict[str, Any] = {"epoch": daemon.epoch, "ok": True, "held": {}}
    if pool is None:
        return found
    try:
        pool.host.pool.check()
    except AssertionError as error:
        found |= {"ok": False, "why": str(error)}
    tier = pool.tiers()["dram"]
    held = {name: tier[name] for name in ("pinned", "reserved", "leaving", "quarantined")}
    held["leases"] = len(pool.host.server.leases)
    held["claims"] = len(pool.cache.claims)
    return found | {"held": held, "resident": tier["resident"], "free": tier["free"]}


async def main(folder: Path, proxy: int) -> None:
    stop, loop = asyncio.Event(), asyncio.get_running_loop()
    loop.add_signal_handler(signal.SIGTERM, stop.set)
    settings, fleet = NodeSettings.read(os.environ), FleetSettings.read(os.environ)
    secret = fleet.secret()
    index = RedisIndex(fleet.redis_url.get_secret_value(), fleet.fleet)
    link = ProxiedTcp(folder, proxy, node=settings.name, secret=secret)
    daemon = NodeDaemon(settings, secret, index, Links({"tcp": link}, "tcp", {}))

    def prove() -> None:
        path = folder / f"{settings.name}.check"
        path.with_suffix(".new").write_text(json.dumps(books(daemon)))
        path.with_suffix(".new").rename(path)

    loop.add_signal_handler(signal.SIGUSR1, prove)
    try:
        async with daemon:
            print(json.dumps({"node": settings.name, "http": daemon.url}), flush=True)  # noqa: T201 - its starter reads it
            await daemon.wait(stop)
    finally:
        await index.close()


if __name__ == "__main__":
    asyncio.run(main(Path(sys.argv[1]), int(sys.argv[2])))
