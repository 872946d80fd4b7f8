"""``prefixfleet-router``: one router process on one port."""

import argparse
import asyncio
import contextlib
import secrets
import signal
import sys
import time

import uvloop
from aiohttp import web

from prefixfleet.router.app import make_app
from prefixfleet.router.core import Fleet, Router
from prefixfleet.router.logs import BlockHandler, flush_logs, start_logging
from prefixfleet.router.settings import RouterSettings
from prefixfleet.store.errors import ConfigError, IndexUnavailable
from prefixfleet.store.load_board import LoadBoard
from prefixfleet.store.redis_index import RedisIndex
from prefixfleet.store.registry import WorkerRegistry
from prefixfleet.store.settings import FleetSettings
from prefixfleet.store.worker_orders import WorkerOrders

BACKLOG = 4_096  # connections that a burst may open before they are accepted; Linux's own limit
LOAD_LIMIT_S = 5.0  # without an index the router serves all the same, by load
DRAIN_S = 10.0  # streams get this long to end after a signal to stop


def main() -> None:
    """Run until SIGTERM or SIGINT. Exits with 2 on a wrong setting, after saying which."""
    argparse.ArgumentParser(
        prog="prefixfleet-router",
        description="The router. Its settings are PREFIXFLEET_* and PREFIXFLEET_ROUTER_* "
        "variables of the environment.",
    ).parse_args()
    log_handler = start_logging()
    try:
        settings, fleet = RouterSettings.read(), FleetSettings.read()
        uvloop.run(_serve(settings, fleet, fleet.secret(), log_handler))
    except (ConfigError, OSError) as error:  # OSError: the address cannot be used
        print(f"prefixfleet-router: {error}", file=sys.stderr)  # noqa: T201
        sys.exit(2)
    finally:
        log_handler.flush()


async def _serve(
    settings: RouterSettings, fleet: FleetSettings, secret: bytes, log_handler: BlockHandler
) -> None:
    url = fleet.redis_url.get_secret_value()
    index, registry = RedisIndex(url, fleet.fleet), WorkerRegistry(url, fleet.fleet)
    orders = WorkerOrders(url, fleet.fleet)
    loads = LoadBoard(url, fleet.fleet, secrets.token_hex(8), time.monotonic)
    async with contextlib.AsyncExitStack() as stack:
        flushing = asyncio.create_task(flush_logs(log_handler))
        stack.callback(flushing.cancel)
        for connected in (index, registry):
            stack.push_async_callback(connected.close)
            with contextlib.suppress(IndexUnavailable):  # it may come later: we start without it
                await connected.prepare()
        for later in (orders, loads):
            stack.push_async_callback(later.close)
        outside = Fleet(index, registry, secret, orders, loads)
        router = await stack.enter_async_context(Router(outside, settings))
        with contextlib.suppress(TimeoutError):  # the first requests should find what there is
            await asyncio.wait_for(router.feed.loaded.wait(), LOAD_LIMIT_S)
        await _listen(router)


async def _listen(router: Router) -> None:
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    runner = app_runner(router)
    await runner.setup()
    try:
        settings = router.settings
        await web.TCPSite(runner, settings.host, settings.port, backlog=BACKLOG).start()
        host, port = runner.addresses[0][:2]
        print(f"prefixfleet router on http://{host}:{port}", flush=True)  # noqa: T201 - for scripts
        await stop.wait()
    finally:
        await runner.cleanup()


def app_runner(router: Router) -> web.AppRunner:
    """Runner of an opened router: a client that leaves cancels its request."""
    return web.AppRunner(
        make_app(router),
        handler_cancellation=True,
        auto_decompress=False,  # `inflate` does it, under a limit and with a clear refusal
        shutdown_timeout=DRAIN_S,
        access_log=None,
    )


if __name__ == "__main__":
    main()
