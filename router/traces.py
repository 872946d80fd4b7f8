"""Request traces to arrivals: Mooncake's, Qwen-Bailian's and OpenAI request logs, by content.

Pure parsing of lines; must not know endpoints. Formats (one JSON object a line):

- Mooncake: ``timestamp`` (ms), ``input_length``, ``output_length``, ``hash_ids`` (one id a block
  of 512 tokens; an id stands for the block and everything before it).
- Qwen-Bailian: the same with ``timestamp`` in seconds, blocks of 16 tokens, and ``chat_id``,
  ``parent_chat_id``, ``turn``, ``type``.
- OpenAI: a request body with ``messages`` or ``prompt``, or a batch line that holds one under
  ``body``; ``timestamp`` in seconds (number or ISO 8601) where there is one, else in file order.
"""

import datetime
import gzip
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import msgspec

from prefixfleet.store.errors import ConfigError

MOONCAKE_BLOCK_TOKENS = 512
BAILIAN_BLOCK_TOKENS = 16
MAX_LINE_BYTES = 64 * 1024 * 1024

_Count = Annotated[int, msgspec.Meta(ge=0)]


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
    timestamp: Annotated[float, msgspec.Meta(ge=0)]
    input_length: _Count
    output_length: _Count
    hash_ids: list[int]
    chat_id: int | str | None = None


def read_trace(path: Path, *, limit: int | None = None) -> list[Arrival]:
    """The arrivals of a trace file (gzip by its name), in order of time.

    Raises:
        ConfigError: file unreadable, empty, or a line that is of none of the formats.
    """
    try:
        with gzip.open(path, "rb") if path.suffix == ".gz" else path.open("rb") as lines:
            arrivals = list(parse_trace(lines, name=str(path), limit=limit))
    except (OSError, EOFError) as error:  # EOFError: a gzip file cut short
        raise ConfigError(f"trace {path}: {error}") from error
    if not arrivals:
        raise ConfigError(f"trace {path}: no requests in it")
    first = min(arrival.at_s for arrival in arrivals)
    shifted = [Arrival(a.at_s - first, a.prompt, a.output_tokens) for a in arrivals]
    return sorted(shifted, key=lambda arrival: arrival.at_s)


def parse_trace(
    lines: Iterable[bytes], *, name: str, limit: int | None = None
) -> Iterator[Arrival]:
    """Arrivals of ``lines`` with the trace's own times. Raises `ConfigError` with the line."""
    count = 0
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        if limit is not None and count >= limit:
            return
        try:
            yield _arrival(line, count)
        except (msgspec.MsgspecError, ValueError, OverflowError, RecursionError) as error:
            raise ConfigError(
                f"trace {name}, line {number}: {error}; got {line[:80]!r}, expected a request in "
                "Mooncake's, Qwen-Bailian's or OpenAI's form"
            ) from error
        count += 1


def _arrival(line: bytes, count: int) -> Arrival:
    if len(line) > MAX_LINE_BYTES:
        raise ValueError(f"{len(line)} bytes, at most {MAX_LINE_BYTES} are read")
    values = msgspec.json.decode(line)
    if not isinstance(values, dict):
        raise ValueError("not a JSON object")
    if "hash_ids" in values:
        return _from_blocks(msgspec.convert(values, _BlockLine))
    return _from_request(values, count)


def _from_blocks(line: _BlockLine) -> Arrival:
    bailian = line.chat_id is not None
    block_tokens = BAILIAN_BLOCK_TOKENS if bailian else MOONCAKE_BLOCK_TOKENS
    if len(line.hash_ids) != -(-line.input_length // block_tokens):
        raise ValueError(
            f"{len(line.hash_ids)} hash_ids for {line.input_length} tokens, expected one a block "
            f"of {block_tokens}"
        )
    prompt = SharedBlocks(tuple(line.hash_ids), line.input_length, block_tokens)
    at_s = line.timestamp if bailian else line.timestamp / 1000
    return Arrival(at_s, prompt, line.output_length)


def _from_request(values: dict[str, Any], count: int) -> Arrival:
    body = values.get("body", values)
    if not isinstance(body, dict) or not ("messages" in body or "prompt" in body):
        raise ValueError("neither hash_ids, messages nor prompt")
    limit = body.get("max_completion_tokens", body.get("max_tokens"))
    if limit is not None and (not isinstance(limit, int) or limit < 1):
        raise ValueError(f"max_tokens is {limit!r}, expected a number of at least 1")
    request = {key: value for key, value in body.items() if key not in ("timestamp", "stream")}
    return Arrival(_seconds(values.get("timestamp"), count), request, limit or 0)


def _seconds(stamp: object, count: int) -> float:
    """Without times the requests arrive one a second, in file order."""
    if stamp is None:
        return float(count)
    if isinstance(stamp, str):
        return datetime.datetime.fromisoformat(stamp).timestamp()
    if isinstance(stamp, int | float) and stamp >= 0:
        return float(stamp)
    raise ValueError(f"timestamp is {stamp!r}, expected seconds or ISO 8601")
