"""What the engine says of a request's prefix, found in the body of its answer."""

from typing import Any

import msgspec

from prefixfleet.store.errors import ConfigError
from prefixfleet.store.records import PARAMS_KEY, Outcome


class _Answer(msgspec.Struct):
    kv_transfer_params: dict[str, Any] | None = None


_DECODER = msgspec.json.Decoder(_Answer)


def read_outcome(answer: bytes) -> Outcome | None:
    """The outcome in a whole answer; None if there is none that can be read."""
    try:
        params = _DECODER.decode(answer).kv_transfer_params
        return Outcome.from_map(params[PARAMS_KEY]) if params and PARAMS_KEY in params else None
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError, ConfigError):
        return None
