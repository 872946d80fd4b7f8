"""A file of settings that is read again when it changes."""

from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import msgspec

from prefixfleet.store.errors import ConfigError

T = TypeVar("T")


@dataclass(slots=True)
class WatchedFile:
    """``setting`` names the file in messages. Owned by the router's event loop.

    Until what was read is accepted the file counts as changed: a wrong one is complained about
    until somebody corrects it.
    """

    setting: str
    path: Path
    _read: tuple[int, int, int] = (0, 0, 0)
    _accepted: tuple[int, int, int] = (0, 0, 0)

    def read(self, kind: type[T]) -> T:
        """The file's content. Raises `ConfigError` if it is absent or not a ``kind``."""
        try:
            return msgspec.json.decode(self.read_bytes(), type=kind)
        except (msgspec.MsgspecError, UnicodeDecodeError) as error:
            raise self.error(str(error)) from error

    def read_bytes(self) -> bytes:
        """The file as it is. Raises `ConfigError` if it is absent."""
        try:
            self._read = self._stat()
            return self.path.read_bytes()
        except OSError as error:
            raise self.error(str(error)) from error

    def accept(self) -> None:
        """What was read last is in use from now on."""
        self._accepted = self._read

    def changed(self) -> bool:
        """Whether it is another file than the one in use.

        Raises:
            ConfigError: it is gone.
        """
        try:
            return self._stat() != self._accepted
        except OSError as error:
            raise self.error(str(error)) from error

    def error(self, problem: str) -> ConfigError:
        """What is wrong with it, and where."""
        return ConfigError(f"{self.setting}: {self.path}: {problem}")

    def _stat(self) -> tuple[int, int, int]:
        stat = self.path.stat()
        return stat.st_mtime_ns, stat.st_ino, stat.st_size
