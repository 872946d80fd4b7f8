"""Runs one asyncio service in a thread of its own, inside a process that belongs to somebody else.

Ray's actors host a daemon or a worker this way: Ray's own calls never wait for it, nor it for them.
"""

import asyncio
import contextlib
import logging
import threading
from collections.abc import Awaitable, Callable
from concurrent.futures import Future
from typing import Any

from prefixfleet.store.errors import ConfigError

log = logging.getLogger(__name__)

Service = Callable[[Callable[[dict[str, Any]], None], asyncio.Event], Awaitable[None]]
"""Runs until the event is set; calls its first argument with a description once it is up."""


class Hosted:
    """A running service. Owned by the process that made it.

    ``ready`` holds the service's description, or what stopped its start. ``ended`` is called when
    a service that was up has ended by a fault.
    """

    def __init__(self, service: Service, ended: Callable[[], None]) -> None:
        self.ready: Future[dict[str, Any]] = Future()
        self._service = service
        self._ended = ended
        self._loop = asyncio.new_event_loop()
        self._stop = asyncio.Event()
        self._thread = threading.Thread(target=self._main, name="service", daemon=True)
        self._thread.start()

    def stop(self, timeout_s: float) -> bool:
        """Ask it to end in order; whether it did within ``timeout_s``."""
        with contextlib.suppress(RuntimeError):  # its loop has ended already
            self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _main(self) -> None:
        try:
            with asyncio.Runner(loop_factory=lambda: self._loop) as runner:
                runner.run(self._run())
        except BaseException as error:  # noqa: BLE001 - the top of a thread: nobody else sees it
            self._failed(error)

    async def _run(self) -> None:
        await self._service(self.ready.set_result, self._stop)
        if not self.ready.done():
            raise ConfigError("stopped before it was up")

    def _failed(self, error: BaseException) -> None:
        if self.ready.done():
            log.critical("the service ended by a fault", exc_info=error)
            self._ended()
        else:
            self.ready.set_exception(error)
