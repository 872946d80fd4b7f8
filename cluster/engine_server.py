"""The daemon's end of `engine_channel`: a Unix socket, and how many connections it takes.

What is said on a connection is the matter of its `EngineSession`.
"""

import asyncio
import itertools
import logging
from collections.abc import Callable
from pathlib import Path

from prefixfleet.cluster.engine_questions import Hello
from prefixfleet.cluster.engine_session import HELLO_S, EngineSession, Welcome
from prefixfleet.store.errors import ConfigError, ProtocolError
from prefixfleet.store.records import Outcome

log = logging.getLogger(__name__)

MAX_SESSIONS = 256


class EngineServer:
    """Serves engines on one Unix socket that only this user may open.

    Owned by the daemon's event loop. `open` takes the socket, `close` drops every session.
    ``gone`` is told of each connection's end that was made ``welcome``.
    """

    def __init__(
        self,
        path: Path,
        *,
        welcome: Welcome,
        gone: Callable[[Hello], None],
        outcome: Callable[[Outcome], None],
    ) -> None:
        self._path = path
        self._welcome = welcome
        self._gone = gone
        self._outcome = outcome
        self._ids = itertools.count(1)
        self._sessions: dict[int, asyncio.Task[None]] = {}
        self._server: asyncio.Server | None = None
        self.refused = 0

    @property
    def connections(self) -> int:
        """Open connections; an engine has one for its scheduler and one for each rank."""
        return len(self._sessions)

    async def open(self) -> None:
        """Listen. A socket file left by a dead daemon is replaced."""
        self._path.unlink(missing_ok=True)
        self._server = await asyncio.start_unix_server(self._accept, self._path)
        self._path.chmod(0o600)  # the folder is private too, so there is no moment in between

    async def close(self) -> None:
        """Stop listening and end every session."""
        if self._server is not None:
            self._server.close()
        for task in list(self._sessions.values()):
            task.cancel()
        await asyncio.gather(*self._sessions.values(), return_exceptions=True)
        self._path.unlink(missing_ok=True)

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        number = next(self._ids)
        if len(self._sessions) >= MAX_SESSIONS:
            self._refuse(f"{MAX_SESSIONS} engine connections are open, one more is refused")
            writer.close()
            return
        task = asyncio.current_task()
        assert task is not None
        self._sessions[number] = task
        session = EngineSession(number, reader, writer, self._outcome)
        try:
            await session.serve(self._welcome)
        except ProtocolError as error:
            self._refuse(str(error))
        except (ConfigError, TimeoutError) as error:
            self._refuse(str(error) or f"no hello within {HELLO_S:g} s")
        except asyncio.CancelledError:
            if self._server is None or self._server.is_serving():
                raise
        finally:
            session.end()
            del self._sessions[number]
            if session.hello is not None:
                self._gone(session.hello)

    def _refuse(self, why: str) -> None:
        self.refused += 1
        log.warning("engine connection closed: %s", why)
