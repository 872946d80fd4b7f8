"""What the subcommands of ``prefixfleet`` do. Each returns the exit status."""

import argparse
import asyncio
import json
import os
import signal
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from rich.console import Console

from prefixfleet.cluster.detached import start_detached
from prefixfleet.cluster.earlier_runs import DEMO, clear_demos, clear_run
from prefixfleet.cluster.run_state import RunDir, StateHome
from prefixfleet.cluster.settings import check_model
from prefixfleet.store.errors import ConfigError
from prefixfleet.store.settings import FleetSettings

if TYPE_CHECKING:
    from prefixfleet.cluster.up import Wish

REDIS_VARIABLE = "PREFIXFLEET_REDIS_URL"
DOWN_S = 90.0
LOOK_S = 0.1
WIDTH = 132
"""Columns that the demo's table needs; a narrower terminal wraps it itself."""

# Modules that need Ray, torch or an engine are imported where they are used: `--help` and the
# router's programs must run without them.
console = Console(stderr=True)


def up(options: argparse.Namespace) -> int:
    """Start a fleet; serve until told to stop, or leave it running with ``--detach``."""
    _check_models(options.model)
    directory = _directory()
    directory.create()
    if options.detach:
        return _detach(directory, options)
    with ExitStack() as stack:
        directory.lock()
        stack.callback(directory.unlock)
        clear_run(directory)
        return asyncio.run(_serve(directory, options))


async def _serve(directory: RunDir, options: argparse.Namespace) -> int:
    from prefixfleet.cluster.up import Supervisor

    stop = _stop_event()
    wish = await asyncio.to_thread(_wish, options)
    async with Supervisor(wish, directory, _say) as supervisor:
        console.print(f"ready: {supervisor.state.endpoint}/v1")
        await supervisor.wait(stop)
        _say("stopping")
    return 0


def _wish(options: argparse.Namespace) -> "Wish":
    from prefixfleet.cluster.up import Wish

    models = _models(options.model)
    _check_shares(options, len(models))
    return Wish(
        fleet=FleetSettings.read().fleet, nodes=options.nodes, models=models,
        redis_url=options.redis or os.environ.get(REDIS_VARIABLE, ""), port=options.port,
        encoding=options.encoding or "", colocate=options.colocate,
    )  # fmt: skip


def _models(folders: Sequence[Path]) -> tuple[Path, ...]:
    """The models of these folders, or the demo's."""
    from prefixfleet.cluster.model import default_cache_dir, demo_model

    return tuple(Path(m).absolute() for m in folders or [demo_model(default_cache_dir(), _say)])


def _check_shares(options: argparse.Namespace, models: int) -> None:
    """Raises `ConfigError` unless each of so many models has an engine."""
    from prefixfleet.cluster.sharing import MAX_KINDS

    if not options.colocate and models > options.nodes:
        raise ConfigError(
            f"--model: got {models} models for {options.nodes} nodes: one each; or let every node "
            "serve them all with --colocate"
        )
    if options.colocate and not 2 <= models <= MAX_KINDS:
        raise ConfigError(f"--colocate: got {models} models, expected 2 to {MAX_KINDS} (--model)")


def _detach(directory: RunDir, options: argparse.Namespace) -> int:
    """Run ``up`` in a session of its own, and wait until it serves or has failed."""
    state = directory.read()
    if state and state.supervisor_alive():
        raise ConfigError(f"a fleet is already up at {state.endpoint}; `prefixfleet down` stops it")
    clear_run(directory)
    # its password is for the environment: everybody may read a command line
    environ = {REDIS_VARIABLE: options.redis} if options.redis else {}
    with console.status("starting the fleet"):
        state = start_detached(directory, _arguments(options), environ)
    sys.stdout.write(f"{state.endpoint}/v1\n")
    return 0


def _arguments(options: argparse.Namespace) -> list[str]:
    arguments = ["--nodes", str(options.nodes), "--port", str(options.port)]
    arguments += ["--encoding", options.encoding] if options.encoding else []
    arguments += ["--colocate"] if options.colocate else []
    return arguments + [word for model in options.model for word in ("--model", str(model))]


def down(options: argparse.Namespace) -> int:
    """Stop what ``up`` started, and nothing else; clean up after a supervisor that died."""
    directory = _directory()
    state = directory.read()
    if state is None:
        console.print(f"no fleet {directory.path.name!r} is up")
        return 0
    if state.supervisor_alive():
        os.kill(state.supervisor, signal.SIGTERM)
        deadline = time.monotonic() + DOWN_S
        with console.status("stopping the fleet"):
            while state.supervisor_alive() and time.monotonic() < deadline:
                time.sleep(LOOK_S)
    clear_run(directory)
    console.print(f"fleet {directory.path.name!r} is down")
    return 0


def status(options: argparse.Namespace) -> int:
    """Show what runs."""
    from prefixfleet.cluster.status import read_status, show_status

    found = asyncio.run(read_status(_directory(), options.endpoint))
    if options.json:
        sys.stdout.write(json.dumps(found) + "\n")
    else:
        show_status(found, Console())
    return 0


def demo(options: argparse.Namespace) -> int:
    """Start a fleet of two, show what sharing gains, and stop it; 1 if any answer differs."""
    started = time.monotonic()
    _check_models(options.model)
    home = StateHome.of_user()
    for name in clear_demos(home):
        _say(f"cleared away what {name} had left")
    directory = home.fleet(f"{DEMO}{os.getpid()}")
    directory.create()
    directory.lock()
    try:
        code = asyncio.run(_demo(directory, options, started))
    except ConfigError as error:
        raise ConfigError(f"{error}\nlogs: {directory.logs}") from error
    finally:
        directory.unlock()
    directory.remove()
    return code


async def _demo(directory: RunDir, options: argparse.Namespace, started: float) -> int:
    from prefixfleet.cluster import demo as shown
    from prefixfleet.cluster.demo_memory import resident_bytes
    from prefixfleet.cluster.up import Supervisor, Wish
    from prefixfleet.store.redis_index import RedisIndex
    from prefixfleet.store.registry import WorkerRegistry

    stop = _stop_event()
    models = await asyncio.to_thread(_models, options.model)
    redis_url = os.environ.get(REDIS_VARIABLE, "")
    wish = Wish(
        fleet=FleetSettings.read().fleet, nodes=2, models=models, redis_url=redis_url, port=0
    )
    async with Supervisor(wish, directory, _say) as fleet:
        index = RedisIndex(fleet.state.redis_url, wish.fleet)
        registry = WorkerRegistry(fleet.state.redis_url, wish.fleet)
        running = asyncio.ensure_future(
            shown.run_demo(fleet.state.endpoint, index, registry, console, started)
        )
        stopping = asyncio.ensure_future(stop.wait())
        try:
            await asyncio.wait({running, stopping}, return_when=asyncio.FIRST_COMPLETED)
            if not running.done():
                return 130
            run = running.result()
            run.memory = resident_bytes(fleet.state.run)
        finally:
            running.cancel()
            stopping.cancel()
            await asyncio.gather(running, stopping, return_exceptions=True)
            await index.close()
            await registry.close()
    if not options.json:
        shown.show(run, Console(width=max(console.width, WIDTH)))
    return shown.finish(run)


def pass_on(module: str, arguments: Sequence[str]) -> NoReturn:
    """Run another of our programs in this process's place."""
    os.execv(sys.executable, [sys.executable, "-m", module, *arguments])


def _check_models(folders: Sequence[Path]) -> None:
    try:
        for folder in folders:
            check_model(folder)
    except ValueError as error:
        raise ConfigError(f"--model: {error}") from None


def _stop_event() -> asyncio.Event:
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    return stop


def _directory() -> RunDir:
    return StateHome.of_user().fleet(FleetSettings.read().fleet)


def _say(what: str) -> None:
    console.print(what, markup=False)
