"""LoRA adapters that engines serve as models of their own: which ones a worker has.

A worker of the fleet says so in its record, with the digests that its connector makes of their
files. A plain vLLM server is asked for its models; its chains are told apart by the adapter's name,
which its KV events have too. SGLang and TensorRT-LLM take adapters in other ways: none of theirs is
served.
"""

from collections.abc import Mapping

import aiohttp
import msgspec

from prefixfleet.router.worker import Worker
from prefixfleet.store.records import WorkerRecord

MAX_ADAPTERS = 1_024
"""Of one worker; those beyond, by name, are not served."""
MAX_NAME = 256
MAX_BYTES = 1 << 20  # of an engine's list of models
TIMEOUT = aiohttp.ClientTimeout(total=5.0)

Adapters = Mapping[str, str | None]
"""What clients call each adapter, and what its chains are told apart by; see `Worker.lora`."""


class AdaptersUnknown(Exception):
    """The engine's list of models cannot be read; says why."""


def by_name(name: str) -> str:
    """What chains of a plain engine's adapter are told apart by: no digest looks like that."""
    return f"name:{name}"


def registered(record: WorkerRecord) -> Adapters:
    """Those of a worker of the fleet."""
    return {name: digest or None for name, digest in record.adapters.items() if _is_name(name)}


async def listed(worker: Worker, session: aiohttp.ClientSession) -> Adapters:
    """Those that a plain vLLM server lists now.

    Raises:
        AdaptersUnknown: it does not answer, or with something else.
    """
    if worker.record.namespace.get("engine") != "static-vllm":
        return {}
    url = f"{worker.record.url}/v1/models"
    try:
        async with session.get(url, timeout=TIMEOUT) as response:
            if response.status == 404:
                return {}
            content = await response.content.read(MAX_BYTES + 1)
            while len(content) <= MAX_BYTES and (more := await response.content.read(MAX_BYTES)):
                content += more
            status = response.status
    except (TimeoutError, aiohttp.ClientError, OSError) as error:
        raise AdaptersUnknown(f"{url}: {type(error).__name__}: {error}") from error
    if status != 200 or len(content) > MAX_BYTES:
        raise AdaptersUnknown(f"{url}: status {status}, {len(content)} bytes or more")
    return {name: by_name(name) for name in _names(content, url)}


class _Card(msgspec.Struct):
    id: str
    parent: str | None = None


class _Cards(msgspec.Struct):
    data: list[_Card]


def _names(content: bytes, url: str) -> list[str]:
    """An adapter is a model with a parent."""
    try:
        cards = msgspec.json.decode(content, type=_Cards).data
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise AdaptersUnknown(f"{url}: the answer is no list of models ({error})") from error
    return [card.id for card in cards if card.parent and _is_name(card.id)]


def _is_name(name: str) -> bool:
    return 0 < len(name) <= MAX_NAME
