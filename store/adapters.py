"""LoRA adapters in an engine's list of models (``GET /v1/models``), as vLLM writes it. Pure.

An adapter is a model with a parent; its root is the folder that it was loaded from.
"""

import msgspec

from prefixfleet.store.errors import ProtocolError

MAX_ADAPTERS = 1_024
"""Of one engine; those beyond, by name, are not served."""
MAX_NAME = 256
MAX_BYTES = 1 << 20  # of the list


class _Card(msgspec.Struct):
    id: str
    root: str | None = None
    parent: str | None = None


class _Models(msgspec.Struct):
    data: list[_Card]


def adapters_in(models: bytes) -> dict[str, str]:
    """Roots of the adapters by name. Raises `ProtocolError` for what is no list of models."""
    if len(models) > MAX_BYTES:
        raise ProtocolError(f"list of models: got more than {MAX_BYTES} bytes")
    try:
        cards = msgspec.json.decode(models, type=_Models).data
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise ProtocolError(f"list of models: got {models[:80]!r} ({error})") from error
    return {card.id: card.root or "" for card in cards if card.parent and is_name(card.id)}


def is_name(name: str) -> bool:
    """Whether an adapter may be called so."""
    return 0 < len(name) <= MAX_NAME
