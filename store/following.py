"""What every follower of an engine's KV events says of itself, whatever way the events come."""

from dataclasses import asdict, dataclass
from typing import Any, Protocol

from prefixfleet.store.engine_mirror import EngineMirror


@dataclass(slots=True)
class Losses:
    """What went wrong while following, counted."""

    gaps: int = 0
    restarts: int = 0
    malformed: int = 0
    failed_replays: int = 0
    overflows: int = 0  # more blocks than anybody follows


class Following(Protocol):
    """Who follows an engine, by whatever way its events come."""

    @property
    def whole(self) -> bool:
        """Whether all that the engine holds is known."""

    @property
    def connected(self) -> bool:
        """Whether it answers at the moment."""

    @property
    def batches(self) -> int:
        """How often it told something."""

    @property
    def losses(self) -> Losses:
        """What went wrong, counted."""

    @property
    def fault(self) -> str:
        """What is wrong at the moment with what is believed; empty if all is well."""


def numbers_of(following: Following, mirror: EngineMirror) -> dict[str, Any]:
    """Blocks that the engine holds, what is known of them and what was lost, for status."""
    return {
        "resident": len(mirror),
        "whole": following.whole,
        "connected": following.connected,
        "unfollowed_blocks": mirror.unfollowed,
        "refused_blocks": mirror.refused,
        "batches": following.batches,
    } | asdict(following.losses)
