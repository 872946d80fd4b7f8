"""What is wrong with the LoRA adapters that workers have, said as degraded modes."""

import logging
from collections.abc import Collection, Iterable

from prefixfleet.router.adapters import Adapters
from prefixfleet.router.degraded import Degraded
from prefixfleet.router.seat import Seat, claimed_twice
from prefixfleet.store.adapters import MAX_ADAPTERS

MAX_NAMED = 20
CLAIMED = "names of adapters"

log = logging.getLogger(__name__)


def bounded(worker: str, adapters: Adapters, degraded: Degraded) -> Adapters:
    """Those that are served: `MAX_ADAPTERS` at most, the first by name."""
    mode = f"number of adapters of {worker}"
    if len(adapters) <= MAX_ADAPTERS:
        degraded.end(mode)
        return adapters
    degraded.enter(
        mode,
        f"got {len(adapters)}, expected {MAX_ADAPTERS} at most; those that come later by name are "
        "not served",
        "spread the adapters over several workers",
    )
    return {name: adapters[name] for name in sorted(adapters)[:MAX_ADAPTERS]}


def say_claims(seats: Iterable[Seat], degraded: Degraded) -> None:
    """Whether names mean more than one thing; see `seat.bases_of`."""
    if twice := claimed_twice(seats):
        degraded.enter(
            CLAIMED,
            f"{some(twice)}: the name of a model, or of adapters of several models; requests go to "
            "the model, or to the adapter of the first of the models",
            "give each adapter a name of its own",
        )
    else:
        degraded.end(CLAIMED)


def say_change(worker: str, before: Adapters, now: Adapters, degraded: Degraded) -> None:
    """Which came and went. Whether one that did is what its worker says shows its next answer."""
    came, went = now.keys() - before.keys(), before.keys() - now.keys()
    log.info("worker %s: adapters %s came, %s went", worker, some(came), some(went))
    for adapter in {name for name, _ in before.items() ^ now.items()}:
        degraded.end(drift(adapter))


def forget(worker: str, adapters: Adapters, degraded: Degraded) -> None:
    """The worker is gone, with what was said of it and of its adapters."""
    said = (f"number of adapters of {worker}", unread(worker), *map(drift, adapters))
    for mode in said:
        degraded.end(mode)


def drift(adapter: str) -> str:
    """The mode in which a worker has other files of an adapter than it says."""
    return f"drift of adapter {adapter!r:.80}"


def unread(worker: str) -> str:
    """The mode in which a plain engine does not say which adapters it has."""
    return f"adapters of {worker}"


def some(names: Collection[str]) -> str:
    """The first of them; there may be thousands."""
    more = f" and {len(names) - MAX_NAMED} more" if len(names) > MAX_NAMED else ""
    return f"{sorted(names)[:MAX_NAMED]}{more}"
