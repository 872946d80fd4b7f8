"""A pytest plugin that notes which lines of the parsers ran, and writes their share to a file:
``pytest -p fuzz_coverage``, the file named by ``FUZZ_COVERAGE``. Standard library only.

A parser is a module whose work is to read what others wrote. Lines are those of its functions: what
runs at the import says nothing.
"""

import importlib
import json
import os
import sys
import threading
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from types import CodeType, FrameType, FunctionType, ModuleType
from typing import Any

PARSERS = (
    "cluster.engine_channel", "cluster.engine_questions", "transfer.wire", "transfer.messages",
    "store.prefetch", "store.records", "store.engine_events", "store.trtllm_events",
    "store.trtllm_mirror", "store.redis_replies", "store.slot", "store.slot_files",
    "router.traces", "router.framing", "router.plain_request", "router.inflate", "router.body",
    "router.messages", "router.prompt", "router.outcome", "router.keys", "router.headers",
)  # fmt: skip

_lines: dict[CodeType, set[int]] = {}
_ran: dict[CodeType, set[int]] = defaultdict(set)


def _codes(module: ModuleType) -> Iterator[CodeType]:
    """Code of every function that is written in ``module``, those inside others included."""
    found = [*vars(module).values()]
    for value in found:
        if isinstance(value, type) and value.__module__ == module.__name__:
            found += [getattr(v, "__func__", getattr(v, "fget", v)) for v in vars(value).values()]
        value = getattr(value, "__wrapped__", value)
        if isinstance(value, FunctionType) and value.__code__.co_filename == module.__file__:
            yield from _nested(value.__code__)


def _nested(code: CodeType) -> Iterator[CodeType]:
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _nested(constant)


def _enter(frame: FrameType, event: str, arg: object) -> Any:
    return _line if frame.f_code in _lines else None


def _line(frame: FrameType, event: str, arg: object) -> Any:
    if event == "line":
        _ran[frame.f_code].add(frame.f_lineno)
    return _line


def shares() -> dict[str, dict[str, Any]]:
    """Of each module its lines, those that ran, and the functions that never did."""
    found: dict[str, dict[str, Any]] = {}
    for code, lines in _lines.items():
        name = Path(code.co_filename).stem
        module = found.setdefault(
            f"{Path(code.co_filename).parent.name}.{name}", {"lines": 0, "ran": 0, "never": []}
        )
        module["lines"] += len(lines)
        module["ran"] += len(_ran[code] & lines)
        if not _ran[code]:
            module["never"].append(code.co_qualname)
    return found


def pytest_configure() -> None:
    """Called by pytest."""
    for name in PARSERS:
        for code in _codes(importlib.import_module(f"prefixfleet.{name}")):
            first = code.co_firstlineno
            _lines[code] = {n for _, _, n in code.co_lines() if n is not None and n > first}
    threading.settrace(_enter)
    sys.settrace(_enter)


def pytest_unconfigure() -> None:
    """Called by pytest."""
    sys.settrace(None)
    threading.settrace(None)
    if path := os.environ.get("FUZZ_COVERAGE"):
        Path(path).write_text(json.dumps(shares()))
