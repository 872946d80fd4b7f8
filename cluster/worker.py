"""A worker: supervises one engine, tells the fleet that it serves, and starts it again.

Must not know Ray or what an engine does with blocks; it meets the node's daemon over HTTP only.
"""

import asyncio
import contextlib
import logging
import os
import time
from collections.abc import AsyncIterator, Awaitable, Mapping
from dataclasses import replace
from typing import Any, TypeVar

import aiohttp

from prefixfleet.cluster.child import Child
from prefixfleet.cluster.engine_command import engine_command, engine_environ
from prefixfleet.cluster.engine_probe import EngineProbe
from prefixfleet.cluster.model import default_cache_dir
from prefixfleet.cluster.ports import hold_port
from prefixfleet.cluster.settings import WorkerSettings
from prefixfleet.cluster.worker_adapters import WorkerAdapters
from prefixfleet.cluster.worker_notice import WorkerNotice
from prefixfleet.store.errors import ConfigError, FleetError, IndexUnavailable
from prefixfleet.store.index import PrefixIndex
from prefixfleet.store.records import WorkerRecord
from prefixfleet.store.registry import WorkerRegistry

log = logging.getLogger(__name__)

T = TypeVar("T")

RENEW_S = 1.0
SILENT_S = 60.0
"""An engine that does not answer /health for so long is started again."""
STOP_S = 15.0
ROUTERS_S = 2.0
"""In this time every router has read that a worker drains: each reads once a second."""
FIRST_PAUSE_S, LAST_PAUSE_S = 1.0, 30.0
STEADY_S = 120.0
"""An engine that served for so long is restarted without the pauses of earlier crashes."""


class EngineFailed(FleetError):
    """The engine ended, or does not answer; says why as far as its log does."""


class Worker:
    """One engine and what is said of it. Owned by one event loop; `run` until cancelled.

    ``ready`` holds the record once the engine serves; it raises what stopped the first start.
    """

    def __init__(
        self, settings: WorkerSettings, index: PrefixIndex, registry: WorkerRegistry
    ) -> None:
        self._settings = settings
        self._index = index
        self._notice = WorkerNotice(settings, registry)
        self._url = ""
        self._waits_for = ""
        self._probe: EngineProbe | None = None  # while the engine serves
        self.ready: asyncio.Future[WorkerRecord] = asyncio.get_running_loop().create_future()
        self.starts = 0

    async def run(self) -> None:
        """Keep the engine serving. Raises `EngineFailed` or `ConfigError` if it never did."""
        pause_s = FIRST_PAUSE_S
        with hold_port(self._settings.host, self._settings.port) as held:
            self._url = _url(self._settings.host, held.getsockname()[1])
            while True:
                began = time.monotonic()
                try:
                    await self._serve_once(held.getsockname()[1])
                except (EngineFailed, ConfigError) as error:
                    if not self.ready.done():
                        self.ready.set_exception(error)
                        self.ready.exception()  # it is raised here: nobody need ask for it there
                        raise
                    log.error("engine %s: %s", self._settings.name, error)
                if time.monotonic() - began > STEADY_S:
                    pause_s = FIRST_PAUSE_S
                await asyncio.sleep(pause_s)
                pause_s = min(2 * pause_s, LAST_PAUSE_S)

    async def _serve_once(self, port: int) -> None:
        """One life of the engine, from its start to its end."""
        self.starts += 1
        async with self._engine(port) as child, aiohttp.ClientSession() as session:
            probe = EngineProbe(self._url, self._settings.model_name, session)
            adapters = WorkerAdapters(probe.adapters, probe.greet, default_cache_dir())
            record = await self._come_up(child, probe, adapters, session)
            if not self.ready.done():
                self.ready.set_result(record)
            self._probe = probe
            looking = asyncio.create_task(adapters.run())
            try:
                await self._stay_up(child, probe, adapters, record)
            finally:
                self._probe = None
                looking.cancel()
                await asyncio.gather(looking, return_exceptions=True)

    async def drain(self) -> bool:
        """Get no new requests, and wait until the engine has none; whether that was in time.

        The engine serves on: cancel `run` afterwards.
        """
        self._notice.leaving = True
        try:
            async with asyncio.timeout(self._settings.drain_s):
                if probe := self._probe:
                    await asyncio.sleep(RENEW_S + ROUTERS_S)
                    await probe.wait_idle()
        except (TimeoutError, ConfigError) as error:
            why = f"{error}" or f"it still had requests after {self._settings.drain_s:g} s"
            log.warning("engine %s: not drained: %s", self._settings.name, why)
            return False
        return True

    @contextlib.asynccontextmanager
    async def _engine(self, port: int) -> AsyncIterator[Child]:
        child = await Child.start(
            engine_command(self._settings, port),
            environ=engine_environ(self._settings, os.environ),
            log_file=self._settings.log_file,
        )
        try:
            yield child
        finally:
            await self._notice.withdraw()
            await child.stop(STOP_S)

    async def _come_up(
        self,
        child: Child,
        probe: EngineProbe,
        adapters: WorkerAdapters,
        session: aiohttp.ClientSession,
    ) -> WorkerRecord:
        self._waits_for = f"{self._url}/health does not answer"
        try:
            async with asyncio.timeout(self._settings.start_s):
                await _unless_ended(child, probe.wait_healthy())
                speed = await _unless_ended(
                    child, probe.prefill_tokens_per_s(self._settings.max_model_tokens)
                )
                kind = await _unless_ended(child, self._node_kind(session))
                await _unless_ended(child, adapters.look())
        except TimeoutError:
            raise EngineFailed(
                f"did not serve within {self._settings.start_s:g} s (PREFIXFLEET_WORKER_START_S): "
                f"{self._waits_for}; {_last_words(child)}"
            ) from None
        log.info("engine %s serves at %s, %.0f tokens/s", self._settings.name, self._url, speed)
        return replace(self._record(kind, speed), adapters=adapters.found)

    async def _stay_up(
        self, child: Child, probe: EngineProbe, adapters: WorkerAdapters, record: WorkerRecord
    ) -> None:
        """Renew while it answers. Raises `EngineFailed` when it ended or fell silent."""
        answered = time.monotonic()
        while True:
            if await _unless_ended(child, probe.healthy()):
                answered = time.monotonic()
                await self._notice.renew(replace(record, adapters=adapters.found))
            elif time.monotonic() - answered > SILENT_S:
                raise EngineFailed(f"does not answer {self._url}/health for {SILENT_S:g} s")
            await _unless_ended(child, asyncio.sleep(RENEW_S))

    async def _node_kind(self, session: aiohttp.ClientSession) -> dict[str, Any]:
        """What the node's daemon says of the engine's namespace, once its connector said hello."""
        node = f"node {self._settings.node}"
        self._waits_for = f"{node}: no daemon of that name in the index"
        while True:
            try:
                for member, record in await self._index.members():
                    if member.node == self._settings.node:
                        async with session.get(f"{record.http}/status") as response:
                            status: dict[str, Any] = await response.json()
                        for kind in status["stats"]["kinds"].values():
                            if self._settings.name in kind["engines"]:
                                return dict(kind)
                        self._waits_for = f"{node}: the engine's connector has not said hello"
            except (IndexUnavailable, aiohttp.ClientError) as error:
                self._waits_for = f"{node}: {error}"
            await asyncio.sleep(RENEW_S)

    def _record(self, kind: Mapping[str, Any], speed: float) -> WorkerRecord:
        return WorkerRecord(
            worker=self._settings.name,
            node=self._settings.node,
            url=self._url,
            model=self._settings.model_name,
            model_path=str(self._settings.model),
            namespace=kind["namespace"],
            block_bytes=kind["slot_bytes"],
            max_model_tokens=self._settings.max_model_tokens,
            prefill_tokens_per_s=speed,
            rollout=self._settings.rollout,
        )


async def _unless_ended(child: Child, work: Awaitable[T]) -> T:
    """Result of ``work``. Raises `EngineFailed` as soon as the engine ends."""
    task, end = asyncio.ensure_future(work), asyncio.ensure_future(child.wait())
    try:
        await asyncio.wait({task, end}, return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        raise EngineFailed(f"ended with status {end.result()}; {_last_words(child)}")
    finally:
        task.cancel()
        end.cancel()
        await asyncio.gather(task, end, return_exceptions=True)


def _last_words(child: Child) -> str:
    """What our connector said in the engine, whose own tracebacks come after it; or the last."""
    said = child.said_after("prefixfleet.store.errors.")
    return f"{said}; see {child.log_file}" if said else f"{child.log_file}:\n{child.log_tail()}"


def _url(host: str, port: int) -> str:
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
