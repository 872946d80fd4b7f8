"""The subcommands that change a running fleet: ``drain``, ``resume``, ``scale``, ``update``.

They write the operator's wish where the fleet reads it, and can wait until it is so. Needs Redis
only: the fleet may be on this machine or anywhere.
"""

import argparse
import asyncio
import os
import re
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from pathlib import Path
from urllib.parse import urlsplit

import aiohttp

from prefixfleet.cluster.commands import REDIS_VARIABLE, console
from prefixfleet.cluster.engine_probe import EngineProbe
from prefixfleet.cluster.rollout import MODEL_SETTING
from prefixfleet.cluster.run_state import StateHome
from prefixfleet.cluster.settings import WorkerSettings, check_model
from prefixfleet.store.errors import ConfigError, IndexUnavailable
from prefixfleet.store.records import FleetWish, WorkerRecord
from prefixfleet.store.registry import WorkerRegistry
from prefixfleet.store.settings import FleetSettings

LOOK_S = 0.5
ANSWER_S = 10.0
"""Of Redis: no request waits for a command, and engines that start take every core of a host."""
PREFIX = "PREFIXFLEET_WORKER_"
SERVED_NAME = f"{PREFIX}SERVED_NAME"
PLACED = ("NAME", "NODE", "HOST", "SOCKET_PATH", "LOG_FILE", "ROLLOUT")
"""Settings that the fleet itself gives to each engine."""

Done = Callable[[FleetWish, Sequence[WorkerRecord]], Awaitable[bool]]


def drain(options: argparse.Namespace) -> int:
    """Send no new requests to workers, nodes or hosts; ``--wait`` until they have none."""
    names = set(options.names)

    def change(wish: FleetWish, workers: Sequence[WorkerRecord]) -> FleetWish:
        kept = {n for n in wish.draining if not _is_address(n) or n in _names(workers)}
        return replace(wish, draining=tuple(sorted(names | kept)))

    async def done(_: FleetWish, workers: Sequence[WorkerRecord]) -> bool:
        drained = [w for w in workers if _names([w]) & names]
        return all(w.state != "ready" for w in drained) and not await _in_flight(drained)

    return asyncio.run(_change(options, change, done, _known(names)))


def resume(options: argparse.Namespace) -> int:
    """Send requests to them again."""
    names = set(options.names)

    def change(wish: FleetWish, _: Sequence[WorkerRecord]) -> FleetWish:
        return replace(wish, draining=tuple(sorted(set(wish.draining) - names)))

    options.wait = 0.0
    return asyncio.run(_change(options, change, _at_once, lambda _: None))


def scale(options: argparse.Namespace) -> int:
    """Let so many nodes run engines, or leave the number to the fleet within bounds."""
    least, most = options.between or (0, 0)
    if bool(options.between) == bool(options.nodes) or least > most:
        raise ConfigError("expected a number of nodes, or --between LEAST MOST with LEAST <= MOST")

    def change(wish: FleetWish, workers: Sequence[WorkerRecord]) -> FleetWish:
        nodes = options.nodes or max(least, min(len({w.node for w in workers}), most))
        wait_s = options.target if most else 0.0
        return replace(wish, nodes=nodes, least=least, most=most, wait_s=wait_s, failed="")

    async def done(wish: FleetWish, workers: Sequence[WorkerRecord]) -> bool:
        return len({w.node for w in workers}) == wish.nodes

    return asyncio.run(_change(options, change, done, lambda _: None))


def update(options: argparse.Namespace) -> int:
    """Exchange all engines, one by one, for engines with other settings."""
    settings = _settings(options)
    expected: set[str] = set()

    def change(wish: FleetWish, _: Sequence[WorkerRecord]) -> FleetWish:
        environ = {**wish.environ, **settings}
        rollout = wish.rollout + 1
        return replace(wish, rollout=rollout, environ=environ, undo=wish.environ, failed="")

    async def done(wish: FleetWish, workers: Sequence[WorkerRecord]) -> bool:
        return expected <= {w.worker for w in workers if w.rollout >= wish.rollout}

    def check(workers: Sequence[WorkerRecord]) -> None:
        expected.update(w.worker for w in workers)
        _check_update(options, settings, workers)

    return asyncio.run(_change(options, change, done, check))


async def _at_once(_: FleetWish, __: Sequence[WorkerRecord]) -> bool:
    return True


async def _in_flight(workers: Sequence[WorkerRecord]) -> int:
    """Requests in these engines, as far as they can be reached from here."""
    async with aiohttp.ClientSession() as session:
        probes = [EngineProbe(w.url, w.model, session) for w in workers]
        return sum(await asyncio.gather(*(probe.in_flight() for probe in probes)))


async def _change(
    options: argparse.Namespace,
    change: Callable[[FleetWish, Sequence[WorkerRecord]], FleetWish],
    done: Done,
    check: Callable[[Sequence[WorkerRecord]], None],
) -> int:
    registry = _registry(options)
    try:
        workers = await registry.workers()
        if not workers:
            raise ConfigError(
                f"no worker of fleet {FleetSettings.read().fleet!r} is announced there; set "
                "PREFIXFLEET_FLEET and --redis, or start it with `prefixfleet up`"
            )
        check(workers)
        wish = await registry.change_wish(lambda before: change(before, workers))
        if options.wait:
            await _until(registry, wish, done, options.wait)
        console.print("done" if options.wait else "asked; `prefixfleet status` shows how far it is")
        return 0
    except IndexUnavailable as error:
        raise ConfigError(f"{error}; set --redis to the fleet's Redis") from error
    finally:
        await registry.close()


async def _until(registry: WorkerRegistry, mine: FleetWish, done: Done, wait_s: float) -> None:
    """Raises `ConfigError` if the fleet gave up, or is not there in time."""
    deadline = time.monotonic() + wait_s
    while True:
        wish, workers = await registry.wish(), await registry.workers()
        # An update that failed before is still written there, and is nothing to a drain
        if wish.failed not in ("", mine.failed) and wish.rollout == mine.rollout:
            raise ConfigError(f"the fleet gave up: {wish.failed}")
        if await done(mine, workers):
            return
        if time.monotonic() > deadline:
            stand = ", ".join(f"{w.worker} {w.state}, rollout {w.rollout}" for w in workers)
            raise ConfigError(f"not done within {wait_s:g} s: {stand}; it goes on")
        await asyncio.sleep(LOOK_S)


def _settings(options: argparse.Namespace) -> dict[str, str]:
    """What an update changes. Raises `ConfigError` with what to write instead."""
    settings = dict(_setting(text) for text in options.set)
    if options.model:
        try:
            settings[MODEL_SETTING] = str(check_model(Path(options.model).absolute()))
        except ValueError as error:
            raise ConfigError(f"--model: {error}") from None
    if not settings:
        raise ConfigError("nothing to update: give --model or --set")
    return settings


def _setting(text: str) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    known = [PREFIX + field.upper() for field in WorkerSettings.model_fields]
    allowed = [n for n in known if n.removeprefix(PREFIX) not in PLACED and n != MODEL_SETTING]
    if not equals or name not in allowed:
        raise ConfigError(
            f"--set: got {text!r:.100}, expected NAME=VALUE with one of {', '.join(allowed)}"
        )
    if not re.fullmatch(r"[\x20-\x7e]{0,1000}", value):
        raise ConfigError(
            f"--set {name}: got {value!r:.100}, expected up to 1,000 plain characters"
        )
    return name, value


def _check_update(
    options: argparse.Namespace, settings: dict[str, str], workers: Sequence[WorkerRecord]
) -> None:
    names = {w.model for w in workers}
    if options.model:
        if len(names) > 1:
            raise ConfigError(f"--model: the fleet serves {sorted(names)}: which would it replace?")
        settings.setdefault(SERVED_NAME, names.pop())  # clients ask for it by its old name
    alone = [w.worker for w in workers if sum(o.model == w.model for o in workers) == 1]
    if alone and not options.downtime:
        raise ConfigError(
            f"nobody else serves the model of {', '.join(alone)}: clients would see errors "
            "meanwhile; scale up first, or give --downtime"
        )


def _names(workers: Sequence[WorkerRecord]) -> set[str]:
    """What these workers can be called: their own names, their nodes', their hosts' addresses."""
    hosts = {urlsplit(w.url).hostname or "" for w in workers}
    return {w.worker for w in workers} | {w.node for w in workers} | hosts


def _is_address(name: str) -> bool:
    """An address is forgotten when nobody has it: unlike a name, it does not come back."""
    return "." in name or ":" in name


def _known(names: set[str]) -> Callable[[Sequence[WorkerRecord]], None]:
    def check(workers: Sequence[WorkerRecord]) -> None:
        known = _names(workers)
        if names - known:
            raise ConfigError(
                f"no worker or node {', '.join(sorted(names - known))}; there are "
                f"{', '.join(sorted(known))}"
            )

    return check


def _registry(options: argparse.Namespace) -> WorkerRegistry:
    """The fleet's: by ``--redis``, the environment, or what `up` wrote down here.

    Its secret, with which a wish is signed, is the environment's or that of the fleet run here.
    """
    fleet = FleetSettings.read()
    here = StateHome.of_user().fleet(fleet.fleet)
    url = options.redis or os.environ.get(REDIS_VARIABLE, "")
    if not url:
        state = here.read()
        if state is None or not state.redis_url:
            raise ConfigError(
                f"no fleet {fleet.fleet!r} runs here; set --redis to the Redis of another one"
            )
        url = state.redis_url
    of_run = fleet.secret_file is None and here.secret_file.exists()
    secret = here.secret_file.read_bytes().strip() if of_run else fleet.secret()
    return WorkerRegistry(url, fleet.fleet, secret=secret, timeout_s=ANSWER_S)
