"""Tells the target node of a plan when it is decided, so that the pull overlaps the queue.

Fire and forget: the engine hands the same plan to the node anyway. A bounded number is on its
way to a node at once; more are dropped and counted.
"""

import logging

import aiohttp

from prefixfleet.router.dispatch import Dispatched
from prefixfleet.router.metrics import Metrics
from prefixfleet.router.on_the_way import OnTheWay
from prefixfleet.router.view import View
from prefixfleet.store.prefetch import (
    PREFETCH_PATH,
    SIGNATURE_HEADER,
    Prefetch,
    encode_prefetch,
    prefetch_key,
    sign,
)

MAX_TO_A_NODE = 32  # on the way at once; one that lives takes a millisecond
TIMEOUT = aiohttp.ClientTimeout(total=2.0)

log = logging.getLogger(__name__)


class Hints:
    """Owned by the router's event loop."""

    def __init__(
        self, session: aiohttp.ClientSession, secret: bytes, view: View, metrics: Metrics
    ) -> None:
        self._session = session
        self._key = prefetch_key(secret)
        self._view = view
        self._metrics = metrics
        self._on_the_way = OnTheWay(MAX_TO_A_NODE)

    def send(self, base_url: str, dispatched: Dispatched) -> None:
        """Send the plan, if it has a source and the node an address."""
        if dispatched.decision.source is None or not base_url:
            return
        url = base_url + PREFETCH_PATH
        if not self._on_the_way.start(url, lambda: self._post(url, dispatched)):
            self._metrics.hints.labels("dropped").inc()

    async def close(self) -> None:
        """Give up what is on its way."""
        await self._on_the_way.close()

    async def _post(self, url: str, dispatched: Dispatched) -> None:
        plan = dispatched.plan
        body = encode_prefetch(
            Prefetch(
                plan=plan,
                namespace=dispatched.worker.namespace,
                chain=tuple(dispatched.chain[: plan.blocks]),
            )
        )
        headers = {SIGNATURE_HEADER: sign(body, self._key)}
        try:
            async with self._session.post(
                url, data=body, headers=headers, timeout=TIMEOUT
            ) as response:
                result = "sent" if response.status < 300 else f"status_{response.status // 100}xx"
        except aiohttp.ClientConnectorError as error:
            log.warning("node %s: %s", dispatched.worker.record.node, error)
            self._view.suspect(dispatched.worker.record.node)
            result = "connect"
        except (TimeoutError, aiohttp.ClientError, OSError) as error:
            log.debug("hint to %s: %s", url, error)
            result = "failed"
        self._metrics.hints.labels(result).inc()
