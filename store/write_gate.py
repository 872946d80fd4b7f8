"""`WriteGate`: whether a disk tier writes now, and what; if not, why. No I/O.

Two things stop the writes: the disk failed a short while ago, or the wear budget, which all
namespaces of the disk share, is used up. Neither stops reads.
"""

import logging
from collections.abc import Callable

from prefixfleet.store.wear import WearBudget

log = logging.getLogger(__name__)

RETRY_S = 60.0
"""Seconds without writes after the disk failed."""

WORN = (
    "disk: the wear budget is used up, blocks leave memory unwritten until it fills again; set "
    "PREFIXFLEET_NODE_SSD_WRITE_BYTES_PER_DAY higher if the disk may take more"
)


class WriteGate:
    """Owned by its `SsdTier`, which tells it how writes end; ``budget`` is the disk's.
    ``takes_all``: a full disk takes what nobody asked for too."""

    def __init__(
        self, budget: WearBudget, clock: Callable[[], float], *, takes_all: bool = False
    ) -> None:
        self._budget = budget
        self._clock = clock
        self._takes_all = takes_all
        self._failure = ""
        self._retry_at = 0.0

    @property
    def open(self) -> bool:
        """Whether writes are tried now; False for a while after the disk failed."""
        return not self._failure or self._clock() >= self._retry_at

    @property
    def takes_unused(self) -> bool:
        """Whether what nobody asked for may push out what is older: not from half of the budget
        on, that is for what was asked for."""
        return self._takes_all and self._budget.left >= 0.5

    @property
    def degraded(self) -> str:
        """Why not everything is written, empty if it is."""
        if not self.open:
            return self._failure
        return WORN if self._budget.used_up else ""

    def affords(self, size: int, count: int) -> int:
        """See `WearBudget.affords`; the first refusal in a while is logged."""
        used_up = self._budget.used_up
        affordable = self._budget.affords(size, count)
        if affordable < count and not used_up:
            log.warning("ssd tier: %s", WORN)
        return affordable

    def failed(self, error: OSError) -> None:
        """The disk refused a write: it is not asked again for `RETRY_S`."""
        self._retry_at = self._clock() + RETRY_S
        if not self._failure:
            log.error("ssd tier: no writes for %g s: %s", RETRY_S, error)
        self._failure = f"disk: {error}"

    def wrote(self) -> None:
        """The disk took a write."""
        if self._failure:
            log.warning("ssd tier: writing again after: %s", self._failure)
            self._failure = ""
