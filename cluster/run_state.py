"""What `prefixfleet up` writes down about a running fleet, so that `status` and `down` find it.

One private folder a fleet: a lock that the supervisor holds for life, the cluster secret, the
logs, and `fleet.json`. Must not know Ray, Redis or engines.
"""

import fcntl
import json
import os
import secrets
import shutil
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Self

from prefixfleet.store.errors import ConfigError

_LOCK, _STATE, _SECRET = "lock", "fleet.json", "secret"


@dataclass(frozen=True, slots=True, kw_only=True)
class RunState:
    """One run of a fleet. ``run`` is a random name that every process of it carries in its
    environment; ``supervisor`` is only meant together with its start time."""

    run: str
    supervisor: int
    started_ticks: int
    phase: str  # "starting" | "ready" | "failed"
    endpoint: str = ""
    redis_url: str = ""  # with its password: the file is private
    runtime_dir: str = ""
    model: str = ""
    error: str = ""

    def supervisor_alive(self) -> bool:
        """Whether that very process still runs, and not another one with its number."""
        return start_ticks(self.supervisor) == self.started_ticks


class RunDir:
    """The folder of one fleet. `lock` makes this process its supervisor until it ends."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._lock_fd: int | None = None

    @property
    def secret_file(self) -> Path:
        """The cluster secret."""
        return self.path / _SECRET

    @property
    def logs(self) -> Path:
        """Folder of what the fleet's processes print."""
        return self.path / "logs"

    def create(self) -> None:
        """Make the folder and the secret, readable by this user only. Raises `ConfigError`."""
        try:
            self.path.mkdir(mode=0o700, parents=True, exist_ok=True)
            self.logs.mkdir(mode=0o700, exist_ok=True)
            if not self.secret_file.exists():
                _write_private(self.secret_file, secrets.token_hex(32))
        except OSError as error:
            raise ConfigError(
                f"cannot keep the fleet's state in {self.path}: {error.strerror}; "
                "set XDG_STATE_HOME to a folder you can write to"
            ) from error

    def lock(self) -> None:
        """Become the supervisor. Raises `ConfigError` if another process is."""
        fd = os.open(self.path / _LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(fd)
            state = self.read()
            where = f" at {state.endpoint}" if state and state.endpoint else ""
            raise ConfigError(
                f"fleet {self.path.name!r} is already up{where} "
                f"(process {state.supervisor if state else '?'}); stop it with `prefixfleet down`"
            ) from None
        self._lock_fd = fd

    def unlock(self) -> None:
        """Stop being the supervisor."""
        if self._lock_fd is not None:
            os.close(self._lock_fd)
            self._lock_fd = None

    def read(self) -> RunState | None:
        """The latest run, or None. Raises `ConfigError` if the file is not ours."""
        try:
            return RunState(**json.loads((self.path / _STATE).read_text()))
        except FileNotFoundError:
            return None
        except (OSError, ValueError, TypeError) as error:
            raise ConfigError(
                f"{self.path / _STATE}: {error}; remove it if no fleet runs"
            ) from error

    def write(self, state: RunState) -> None:
        """Replace what is written, in one step."""
        _write_private(self.path / _STATE, json.dumps(asdict(state), indent=1))

    def forget(self) -> None:
        """Remove what was written about the run."""
        (self.path / _STATE).unlink(missing_ok=True)

    def remove(self) -> None:
        """Remove the folder with everything in it: the fleet will not come again."""
        shutil.rmtree(self.path, ignore_errors=True)


@dataclass(frozen=True, slots=True)
class StateHome:
    """Where fleets keep their folders: ``$XDG_STATE_HOME/prefixfleet``."""

    path: Path

    @classmethod
    def of_user(cls) -> Self:
        """This user's own."""
        home = os.environ.get("XDG_STATE_HOME") or str(Path.home() / ".local" / "state")
        return cls(Path(home) / "prefixfleet")

    def fleet(self, name: str) -> RunDir:
        """Folder of one fleet; nothing is made yet."""
        return RunDir(self.path / name)


def start_ticks(pid: int) -> int:
    """When a process started, in clock ticks since boot; 0 if there is none."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return 0
    fields = stat.rsplit(")", 1)[1].split()
    return 0 if fields[0] == "Z" else int(fields[19])


def _write_private(path: Path, text: str) -> None:
    part = path.with_suffix(f".{os.getpid()}.part")
    fd = os.open(part, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    with os.fdopen(fd, "w") as file:
        file.write(text)
    part.replace(path)
