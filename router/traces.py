"""Request traces to arrivals: Mooncake's, Qwen-Bailian's and OpenAI request logs, by content.

Pure parsing of lines; must not know endpoints. Formats (one JSON object a line):

- Mooncake: ``timestamp`` (ms), ``input_length``, ``output_length``, ``hash_ids`` (one id a block
  of 512 tokens; an id stands for the block and everything before it).
- Qwen-Bailian: the same with ``timestamp`` in seconds, blocks of 16 tokens, whose ids may stand
  for their content alone, and ``chat_id``, ``parent_chat_id``, ``turn``, ``type``.
- OpenAI: a request body with ``messages`` or ``prompt``, or a batch line that holds one under
  ``body``; ``timestamp`` in seconds (number or ISO 8601) where there is one, else in file order.
"""

import datetime
import gzip
import itertools
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, BinaryIO

import msgspec

from prefixfleet.router.text_blocks import BLOCK_TOKENS as TEXT_BLOCK_TOKENS
from prefixfleet.router.text_blocks import block_ids
from prefixfleet.router.trace_ids import FIRST_OWN, PrefixIds
from prefixfleet.store.errors import ConfigError

MOONCAKE_BLOCK_TOKENS = 512
BAILIAN_BLOCK_TOKENS = 16
MAX_LINE_BYTES = 64 * 1024 * 1024
MAX_TEXT_BYTES = 2 * 1024**3
"""Of all prompts together that are kept as they are."""
MAX_SECONDS = 1e12
"""A later time than any clock's, in milliseconds too."""
EMPTY: tuple[object, ...] = ("", [], [""], [[]])
NO_TOKENS = "a prompt of 0 tokens, expected at least 1"

_Count = Annotated[int, msgspec.Meta(ge=0)]
_Id = Annotated[int, msgspec.Meta(ge=0, le=FIRST_OWN - 1)]
_Time = Annotated[float, msgspec.Meta(ge=0, le=1000 * MAX_SECONDS)]


@dataclass(frozen=True, slots=True)
class SharedBlocks:
    """A prompt known by what it shares: ``tokens`` tokens, one id a block of ``block_tokens``.

    Equal ids mean equal blocks with equal blocks before them; the last block may be partial.
    """

    ids: tuple[int, ...]
    tokens: int
    block_tokens: int


@dataclass(frozen=True, slots=True)
class Arrival:
    """One request of a trace, ``at_s`` seconds after the trace's first.

    ``prompt`` is `SharedBlocks` or the request body of an OpenAI call.
    """

    at_s: float
    prompt: SharedBlocks | dict[str, Any]
    output_tokens: int


class _BlockLine(msgspec.Struct):
    timestamp: _Time
    input_length: _Count
    output_length: _Count
    hash_ids: list[_Id]
    chat_id: int | str | None = None


def read_trace(path: Path, *, limit: int | None = None, as_blocks: bool = False) -> list[Arrival]:
    """The arrivals of a trace file (gzip by its name), in order of time.

    With ``as_blocks`` prompts of text are made `SharedBlocks` too. What is kept is bounded.

    Raises:
        ConfigError: file unreadable, empty, too big without a limit, or a line that is of none of
            the formats.
    """
    try:
        with gzip.open(path, "rb") if path.suffix == ".gz" else path.open("rb") as lines:
            arrivals = list(parse_trace(lines, name=str(path), limit=limit, as_blocks=as_blocks))
    except (OSError, EOFError, zlib.error) as error:  # EOFError: a gzip file cut short
        raise ConfigError(f"trace {path}: {error}") from error
    if not arrivals:
        raise ConfigError(f"trace {path}: no requests in it")
    first = min(arrival.at_s for arrival in arrivals)
    shifted = [Arrival(a.at_s - first, a.prompt, a.output_tokens) for a in arrivals]
    return sorted(shifted, key=lambda arrival: arrival.at_s)


def parse_trace(
    lines: BinaryIO | gzip.GzipFile, *, name: str, limit: int | None = None, as_blocks: bool = False
) -> Iterator[Arrival]:
    """Arrivals of ``lines`` with the trace's own times. Raises `ConfigError` with the line."""
    reader, count = _Reader(as_blocks), 0
    for number in itertools.count(1):
        line = lines.readline(MAX_LINE_BYTES + 1)
        if not line or (limit is not None and count >= limit):
            return
        if not line.strip():
            continue
        try:
            yield reader.arrival(line, count)
        except (msgspec.MsgspecError, ValueError, OverflowError, RecursionError) as error:
            raise ConfigError(
                f"trace {name}, line {number}: {error}; got {line[:80]!r}, expected a request in "
                "Mooncake's, Qwen-Bailian's or OpenAI's form"
            ) from error
        count += 1


class _Reader:
    """What lines have in common: their ids, and what is kept of them. Owned by `parse_trace`."""

    def __init__(self, as_blocks: bool) -> None:
        self._as_blocks = as_blocks
        self._ids = PrefixIds()
        self._text_bytes = 0
        self._timed: bool | None = None

    def arrival(self, line: bytes, count: int) -> Arrival:
        if len(line) > MAX_LINE_BYTES:
            raise ValueError(f"more than {MAX_LINE_BYTES} bytes, at most so many are read")
        values = msgspec.json.decode(line)
        if not isinstance(values, dict):
            raise ValueError("not a JSON object")
        if "hash_ids" in values:
            return self._from_blocks(msgspec.convert(values, _BlockLine))
        if not self._as_blocks:
            self._text_bytes += len(line)
            if self._text_bytes > MAX_TEXT_BYTES:
                raise ValueError(
                    f"more than {MAX_TEXT_BYTES:,} bytes of prompts up to here; --limit reads the "
                    "first requests only"
                )
        return self._from_request(values, count)

    def _from_blocks(self, line: _BlockLine) -> Arrival:
        bailian = line.chat_id is not None
        block_tokens = BAILIAN_BLOCK_TOKENS if bailian else MOONCAKE_BLOCK_TOKENS
        if not line.input_length:
            raise ValueError(NO_TOKENS)
        if len(line.hash_ids) != -(-line.input_length // block_tokens):
            raise ValueError(
                f"{len(line.hash_ids)} hash_ids for {line.input_length} tokens, expected one a "
                f"block of {block_tokens}"
            )
        prompt = SharedBlocks(self._ids.of(line.hash_ids), line.input_length, block_tokens)
        at_s = line.timestamp if bailian else line.timestamp / 1000
        return Arrival(at_s, prompt, line.output_length)

    def _from_request(self, values: dict[str, Any], count: int) -> Arrival:
        body = values.get("body", values)
        if not isinstance(body, dict) or not ("messages" in body or "prompt" in body):
            raise ValueError("neither hash_ids, messages nor prompt")
        limit = body.get("max_completion_tokens", body.get("max_tokens"))
        if limit is not None and (not isinstance(limit, int) or limit < 1):
            raise ValueError(f"max_tokens is {limit!r}, expected a number of at least 1")
        at_s = self._seconds(values.get("timestamp"), count)
        if body.get("prompt", body.get("messages")) in EMPTY:
            raise ValueError(NO_TOKENS)
        if self._as_blocks:
            ids, tokens = block_ids(body)
            if not tokens:
                raise ValueError(NO_TOKENS)
            blocks = SharedBlocks(self._ids.of(ids), tokens, TEXT_BLOCK_TOKENS)
            return Arrival(at_s, blocks, limit or 0)
        request = {key: value for key, value in body.items() if key not in ("timestamp", "stream")}
        return Arrival(at_s, request, limit or 0)

    def _seconds(self, stamp: object, count: int) -> float:
        """Without times the requests arrive one a second, in file order: all of them or none."""
        timed = stamp is not None
        if self._timed not in (None, timed):
            raise ValueError(
                f"{'a' if timed else 'no'} timestamp, where the requests before it have "
                f"{'none' if timed else 'one'}; expected one in each line, or in none"
            )
        self._timed = timed
        return _seconds(stamp, count)


def _seconds(stamp: object, count: int) -> float:
    if stamp is None:
        return float(count)
    if isinstance(stamp, str):
        return datetime.datetime.fromisoformat(stamp).timestamp()
    if isinstance(stamp, int | float) and 0 <= stamp <= MAX_SECONDS:
        return float(stamp)
    raise ValueError(f"timestamp is {stamp!r}, expected seconds or ISO 8601")
