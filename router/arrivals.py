"""A request that finds no worker waits a little for one: most come back within seconds.

All workers of a model are away for a moment when the last one is examined after a fault, when a
router has just started, and when the registry was emptied. A refusal then is an error for clients
that ask once, and sends those that ask again away too early.
"""

import asyncio
import contextlib
from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING

from prefixfleet.router.errors import AllDrained, NoWorker, UnknownModel

if TYPE_CHECKING:
    from prefixfleet.router.core import Router
    from prefixfleet.router.dispatch import Chains
    from prefixfleet.router.keys import Key
    from prefixfleet.router.settings import RouterSettings
    from prefixfleet.router.watch import Passage
    from prefixfleet.router.worker import Worker


MAX_SHARE = 0.25
"""Of the requests that a router takes so many may wait like that: those of a model whose workers
are away must not shut out those of other models."""


def patience_s(settings: "RouterSettings", key: "Key", deadline_s: float) -> float:
    """Seconds that a request waits for a worker: no longer than any limit on its first token."""
    wait_s, slo_s = settings.worker_wait_s, key.ttft_slo_s or settings.ttft_slo_s
    if slo_s or deadline_s:
        return min([wait_s, *filter(None, (slo_s, deadline_s))])
    return wait_s


async def ready_by(router: "Router", model: str, until_s: float) -> "Sequence[Worker]":
    """Workers that may get a request for ``model``, at least one, as soon as there are any.

    Raises:
        UnknownModel: the model is not served here; at once.
        AllDrained: no worker of the model will come back by itself; at once.
        NoWorker: there was none until ``until_s`` of the router's clock; or too many wait already.
    """
    roster, counted = router.roster, False
    most = max(1, int(MAX_SHARE * router.settings.max_in_flight))
    while True:
        came = roster.next_arrival()
        try:
            return roster.openings.ready(model)
        except AllDrained:
            raise
        except NoWorker:
            left_s = until_s - router.clock()
            if left_s <= 0 or router.without_worker >= most:
                raise
        if not counted:
            router.metrics.waits_for_worker.inc()
            counted = True
        router.without_worker += 1
        try:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(came.wait(), left_s)
        finally:
            router.without_worker -= 1


async def newcomers(
    passage: "Passage", chains: "Chains", unwilling: Collection[str], until_s: float
) -> "list[Worker]":
    """Workers that came, or came back, since the request did, and read prompts alike."""
    model = passage.body.get("model", str) or ""
    with contextlib.suppress(NoWorker):
        await ready_by(passage.router, model, until_s)
    return there_now(passage, chains, unwilling)


def there_now(passage: "Passage", chains: "Chains", without: Collection[str]) -> "list[Worker]":
    """Workers but ``without`` that may get the request now and read prompts alike."""
    model = passage.body.get("model", str) or ""
    with contextlib.suppress(NoWorker, AllDrained, UnknownModel):
        ready = passage.router.roster.openings.ready(model)
        return [w for w in ready if w.name not in without and w.kind in chains]
    return []


async def bring_newcomers(router: "Router") -> None:
    """Let those that wait for busy workers go to one that comes, until cancelled."""
    while True:
        await router.roster.next_arrival().wait()
        router.turns.reconsider()
