"""``prefixfleet-router``: one router process on one port."""

import argparse
import asyncio
import contextlib
import os
import secrets
import signal
import sys
import time
from collections.abc import AsyncIterator
from pathlib import Path

import uvloop

from prefixfleet.router.app import lane_routes, make_app
from prefixfleet.router.bursts import Bursts
from prefixfleet.router.core import Router
from prefixfleet.router.edge import Edge
from prefixfleet.router.fleet import Fleet
from prefixfleet.router.garbage import look_seldom
from prefixfleet.router.lane import LaneRunner
from prefixfleet.router.logs import BlockHandler, flush_logs, start_logging
from prefixfleet.router.processes import run_processes
from prefixfleet.router.settings import RouterSettings
from prefixfleet.router.siblings import serve_siblings
from prefixfleet.store.errors import ConfigError, IndexUnavailable
from prefixfleet.store.index import ENGINE_AREA
from prefixfleet.store.load_board import LoadBoard
from prefixfleet.store.poll_rights import PollRights
from prefixfleet.store.redis_index import RedisIndex
from prefixfleet.store.registry import WorkerRegistry
from prefixfleet.store.settings import FleetSettings
from prefixfleet.store.stored_responses import StoredResponses
from prefixfleet.store.worker_orders import WorkerOrders

BACKLOG = 4_096  # connections that a burst may open before they are accepted; Linux's own limit
LOAD_LIMIT_S = 5.0  # without an index the router serves all the same, by load
PARENT_LOOK_S = 1.0
DRAIN_S = 10.0  # streams get this long to end after a signal to stop


def main() -> None:
    """Run until SIGTERM or SIGINT. Exits with 2 on a wrong setting, after saying which."""
    options = _options()
    log_handler = start_logging()
    try:
        settings, fleet = RouterSettings.read(), FleetSettings.read()
        if settings.log_format == "json":
            log_handler.use_json()
        if options.processes > 1:
            sys.exit(run_processes(options.processes, settings, os.environ))
        uvloop.run(_serve(settings, fleet, options, log_handler))
    except (ConfigError, OSError) as error:  # OSError: the address cannot be used
        print(f"prefixfleet-router: {error}", file=sys.stderr)  # noqa: T201
        sys.exit(2)
    finally:
        log_handler.flush()


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="prefixfleet-router",
        description="The router. Its settings are PREFIXFLEET_* and PREFIXFLEET_ROUTER_* "
        "variables of the environment.",
    )
    parser.add_argument(
        "--processes",
        type=int,
        choices=range(1, 257),
        metavar="N",
        default=1,
        help="routers that share the port, one a core; limits of API keys count in each",
    )
    # what `run_processes` tells each of them
    parser.add_argument("--parent", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--sibling-socket", type=Path, help=argparse.SUPPRESS)
    return parser.parse_args()


async def _serve(
    settings: RouterSettings,
    fleet: FleetSettings,
    options: argparse.Namespace,
    log_handler: BlockHandler,
) -> None:
    secret = fleet.secret()
    url = fleet.redis_url.get_secret_value()
    index, registry = RedisIndex(url, fleet.fleet), WorkerRegistry(url, fleet.fleet)
    orders = WorkerOrders(url, fleet.fleet, secret)
    me = secrets.token_hex(8)
    loads = LoadBoard(url, fleet.fleet, me, time.monotonic)
    polls = PollRights(url, fleet.fleet, me)
    async with contextlib.AsyncExitStack() as stack:
        flushing = asyncio.create_task(flush_logs(log_handler))
        stack.callback(flushing.cancel)
        for connected in (index, registry):
            stack.push_async_callback(connected.close)
            with contextlib.suppress(IndexUnavailable):  # it may come later: we start without it
                await connected.prepare()
        engines = RedisIndex(url, fleet.fleet, area=ENGINE_AREA)
        responses = StoredResponses(url, fleet.fleet)
        for later in (orders, loads, engines, polls, responses):
            stack.push_async_callback(later.close)
        outside = Fleet(index, registry, secret, orders, loads, engines, polls, responses)
        router = await stack.enter_async_context(Router(outside, settings))
        with contextlib.suppress(TimeoutError):  # the first requests should find what there is
            await asyncio.wait_for(router.feed.loaded.wait(), LOAD_LIMIT_S)
        if options.sibling_socket:
            siblings = await serve_siblings(router, options.sibling_socket)
            stack.push_async_callback(siblings.cleanup)
        look_seldom()
        await _listen(router, options)


async def _listen(router: Router, options: argparse.Namespace) -> None:
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    asyncio.get_running_loop().add_signal_handler(signal.SIGHUP, router.reload)
    runner = app_runner(router, options.sibling_socket)
    await runner.setup()
    watching = None
    try:
        async with _listening(runner, router, options) as address:
            scheme = "https" if router.files.tls.listener else "http"
            print(f"prefixfleet router on {scheme}://{address}", flush=True)  # noqa: T201 - for scripts
            if options.parent is not None:
                watching = asyncio.create_task(_watch(options.parent, stop))
            await stop.wait()
    finally:
        if watching:
            watching.cancel()
        await runner.cleanup()


@contextlib.asynccontextmanager
async def _listening(
    runner: LaneRunner, router: Router, options: argparse.Namespace
) -> AsyncIterator[str]:
    """Accepts connections for the runner's server; says where."""
    lanes, settings, tls = runner.lanes, router.settings, router.files.tls.listener
    server = await asyncio.get_running_loop().create_server(
        lanes,
        settings.host,
        settings.port,
        backlog=BACKLOG,
        ssl=tls,
        reuse_port=options.parent is not None or None,
    )
    lanes.bursts = Bursts(server.sockets, lanes, tls=tls)
    try:
        host, port = server.sockets[0].getsockname()[:2]
        yield f"{host}:{port}"
    finally:
        lanes.bursts.close()
        server.close()


async def _watch(parent: int, stop: asyncio.Event) -> None:
    """Stop when the process that started us is gone: nobody else would end us."""
    while os.getppid() == parent:  # noqa: ASYNC110 - the kernel has no event for it
        await asyncio.sleep(PARENT_LOOK_S)
    stop.set()


def app_runner(router: Router, sibling_socket: Path | None = None) -> LaneRunner:
    """Runner of an opened router: a client that leaves cancels its request."""
    return LaneRunner(
        make_app(router, sibling_socket),
        lane_routes(router),
        Edge(router.metrics, router.settings.silence_timeout_s, router.new_id),
        handler_cancellation=True,
        auto_decompress=False,  # `inflate` does it, under a limit and with a clear refusal
        shutdown_timeout=DRAIN_S,
        access_log=None,
    )


if __name__ == "__main__":
    main()
