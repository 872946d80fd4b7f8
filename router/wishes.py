"""Wishes that a prefix stays on its nodes for a while: an operator's by call, a client's by header.

A node keeps no more than its quota; what it says that it covers is passed on as it says it.
"""

import asyncio
import logging
from collections.abc import Callable, Iterable, Mapping
from typing import Annotated

import aiohttp
import msgspec

from prefixfleet.router.metrics import Metrics
from prefixfleet.router.on_the_way import OnTheWay
from prefixfleet.store.keep import KEEP_PATH, Keep, encode_keep, keep_key
from prefixfleet.store.prefetch import SIGNATURE_HEADER, sign
from prefixfleet.store.records import NodeRecord

MAX_TO_A_NODE = 32  # on the way at once, of those that nobody waits for
MAX_AT_ONCE = 32
TIMEOUT = aiohttp.ClientTimeout(total=5.0)

log = logging.getLogger(__name__)


class Told(msgspec.Struct, omit_defaults=True):
    """What a node answered: leading blocks that it keeps of its ``quota``, or why none."""

    covered: Annotated[int, msgspec.Meta(ge=0)] = 0
    quota: Annotated[int, msgspec.Meta(ge=0)] = 0
    error: str = ""


class Wishes:
    """Owned by the router's event loop."""

    def __init__(
        self,
        session: aiohttp.ClientSession,
        secret: bytes,
        records: Callable[[], Mapping[str, NodeRecord]],
        metrics: Metrics,
    ) -> None:
        self._session = session
        self._key = keep_key(secret)
        self._records = records
        self._metrics = metrics
        self._on_the_way = OnTheWay(MAX_TO_A_NODE)

    def send(self, node: str, wish: Keep) -> None:
        """Like `ask`, and nobody waits for the answer. A bounded number is on its way at once."""
        if not self._on_the_way.start(node, lambda: self.ask([node], wish)):
            self._metrics.wishes.labels("dropped").inc()

    async def ask(self, nodes: Iterable[str], wish: Keep) -> dict[str, Told]:
        """What each of ``nodes`` says to the wish; one that cannot be asked says why."""
        body = encode_keep(wish)
        names, places = list(nodes), asyncio.Semaphore(MAX_AT_ONCE)
        told = await asyncio.gather(*(self._ask(name, body, places) for name in names))
        return dict(zip(names, told, strict=True))

    async def close(self) -> None:
        """Give up what is on its way."""
        await self._on_the_way.close()

    async def _ask(self, node: str, body: bytes, places: asyncio.Semaphore) -> Told:
        record = self._records().get(node)
        if record is None or not record.http:
            told = Told(error="the node has no address")
        else:
            async with places:
                told = await self._post(record.http + KEEP_PATH, body)
        self._metrics.wishes.labels("failed" if told.error else "told").inc()
        if told.error:
            log.warning("node %s keeps nothing: %s", node, told.error)
        return told

    async def _post(self, url: str, body: bytes) -> Told:
        headers = {SIGNATURE_HEADER: sign(body, self._key)}
        try:
            async with self._session.post(
                url, data=body, headers=headers, timeout=TIMEOUT
            ) as response:
                told = msgspec.json.decode(await response.read(), type=Told)
                if response.status >= 300 and not told.error:
                    return Told(error=f"status {response.status}")
                return told
        except (TimeoutError, aiohttp.ClientError, OSError) as error:
            return Told(error=f"{type(error).__name__}: {error}")
        except (msgspec.MsgspecError, UnicodeDecodeError) as error:
            return Told(error=f"its answer is no JSON of ours: {error}")
