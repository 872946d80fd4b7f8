"""How a program ends: what it found goes out, whatever happens to a file or to standard output.

Exit statuses: 2 for wrong arguments or files, 1 for a result that could not be written, 130 after
an interruption.
"""

import os
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from rich.console import Console

from prefixfleet.store.errors import ConfigError


class _Unheard(Exception):
    """Standard output takes nothing."""


def ended(name: str, run: Callable[[], int]) -> int:
    """The exit status of ``run``, with one line about what ended it early."""
    try:
        return run()
    except ConfigError as error:
        complain(name, str(error))
        return 2
    except _Unheard as error:
        complain(name, str(error))
        return 1
    except KeyboardInterrupt:
        complain(name, "interrupted")
        return 130


def complain(name: str, what: str) -> None:
    """Say on standard error why ``prefixfleet NAME`` fails."""
    Console(stderr=True).print(f"prefixfleet {name}: {what}", style="red", markup=False)


def tell(text: str) -> None:
    """Write to standard output; where that fails, `ended` says so in a line."""
    if sys.stdout is None:
        raise _Unheard("standard output is closed: the result is not printed")
    try:
        sys.stdout.write(text)
        sys.stdout.flush()
    except OSError as error:
        _silence()
        raise _Unheard(f"standard output takes nothing ({error.strerror})") from error


@contextmanager
def told(console: Console) -> Iterator[None]:
    """What is printed on ``console`` meanwhile is told, as it would have been shown there."""
    with console.capture() as shown:
        yield
    tell(shown.get())


def _silence() -> None:
    """What is left in the buffer would fail again when the interpreter ends."""
    with open(os.devnull, "w") as nowhere:
        os.dup2(nowhere.fileno(), sys.stdout.fileno())


def check_targets(targets: Mapping[str, Path | None]) -> None:
    """Before the work: can a file be written at the path of each option? Raises `ConfigError`."""
    for option, path in targets.items():
        if path is not None and (why := _unwritable(path)):
            raise ConfigError(f"{option} {path}: {why}")


def _unwritable(path: Path) -> str:
    if path.is_dir():
        return "got a folder, expected the name of a file"
    if not path.parent.is_dir():
        return f"got a file in {path.parent}, which is no folder; make it first"
    if not os.access(path if path.exists() else path.parent, os.W_OK):
        return "may not be written here"
    return ""


def write_all(name: str, files: Mapping[Path, Callable[[], str]]) -> bool:
    """Write each file; whether all could be. What could not be is said on standard error."""
    written = True
    for path, text in files.items():
        try:
            path.write_text(text(), encoding="utf-8")
        except OSError as error:
            complain(name, f"{path} is not written: {error}")
            written = False
    return written
