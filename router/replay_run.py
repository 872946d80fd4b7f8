"""A replay's run as ``--out`` writes it, read again for ``--compare``: checked like every file."""

from pathlib import Path
from typing import Annotated, Any

import msgspec

from prefixfleet.store.errors import ConfigError

_Count = Annotated[int, msgspec.Meta(ge=0, le=1 << 53)]
_Amount = Annotated[float, msgspec.Meta(ge=0)]


class _Seconds(msgspec.Struct):
    mean: _Amount
    p50: _Amount
    p90: _Amount
    p99: _Amount


class _Figures(msgspec.Struct):
    """What the report shows of them."""

    requests: _Count
    errors: _Count
    ttft_s: _Seconds
    tbt_s: _Seconds
    hit_rate: _Seconds
    requests_per_s: _Amount
    goodput_per_s: _Amount
    output_tokens_per_s: _Amount
    local_tokens: _Count
    pulled_tokens: _Count
    recomputed_tokens: _Count
    cut_short: bool = False
    requests_in_trace: _Count = 0


class _Sample(msgspec.Struct):
    sent_s: _Amount
    ttft_s: _Amount
    prompt_tokens: _Count
    cached_tokens: _Count
    error: str


class _Run(msgspec.Struct):
    trace: str
    endpoint: str
    figures: _Figures
    samples: list[_Sample]


def load_run(path: Path) -> dict[str, Any]:
    """A run that ``--out`` wrote. Raises `ConfigError` if the file is something else."""
    try:
        run: dict[str, Any] = msgspec.json.decode(path.read_bytes())
        msgspec.convert(run, _Run)
    except (OSError, msgspec.MsgspecError, RecursionError) as error:
        raise ConfigError(
            f"--compare {path}: {error}; expected a run that --out of `prefixfleet replay` wrote"
        ) from error
    return run
