"""LoRA adapters that engines serve as models of their own: which ones a worker has.

A worker of the fleet says so in its record, with the digests that its connector makes of their
files. A plain vLLM server is asked for its models; its chains are told apart by the adapter's name,
which its KV events have too. SGLang and TensorRT-LLM take adapters in other ways: none of theirs is
served.
"""

from collections.abc import Mapping

import aiohttp

from prefixfleet.router.worker import Worker
from prefixfleet.store.adapters import MAX_BYTES, adapters_in, is_name
from prefixfleet.store.errors import ProtocolError
from prefixfleet.store.records import WorkerRecord

NOT_TOLD = (401, 403, 404, 405)
"""An engine without the route, or that wants a key of its own for it, has none for us."""
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
    return {name: digest or None for name, digest in record.adapters.items() if is_name(name)}


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
            if response.status in NOT_TOLD:
                return {}
            content = b""
            while len(content) <= MAX_BYTES and (more := await response.content.read(MAX_BYTES)):
                content += more
            status = response.status
    except (TimeoutError, aiohttp.ClientError, OSError) as error:
        raise AdaptersUnknown(f"{url}: {type(error).__name__}: {error}") from error
    if status != 200:
        raise AdaptersUnknown(f"{url}: status {status}")
    try:
        return {name: by_name(name) for name in adapters_in(content)}
    except ProtocolError as error:
        raise AdaptersUnknown(f"{url}: {error}") from error
