"""The whole exception tree. Losing a block is normal; every error of a pull ends in recompute.

FleetError
├── ConfigError          at start only; the process exits
├── IndexUnavailable     Redis slow or gone: counts as a miss
├── PullFailed           the caller recomputes; `reason` labels the metric
│   ├── PeerLost         connection refused, reset or closed
│   ├── PeerRefused      the peer said no: wrong secret, version, namespace
│   │   └── PeerBusy     not now: it serves as much as it may
│   ├── DeadlineExceeded our own clock ran out
│   ├── EpochChanged     the source is another life of the node
│   ├── LeaseExpired     the source no longer promises the blocks
│   ├── LayoutMismatch   slot sizes differ
│   ├── ProtocolError    bytes that no correct peer sends
│   └── CorruptBlock     checksum, hash or namespace of a block is wrong
├── PoolFull             every slot is pinned
├── Fenced               this node's epoch was taken over; it must stop publishing
└── Overloaded           429 with Retry-After
"""

from typing import ClassVar


class FleetError(Exception):
    """Root of every error that prefixfleet raises on purpose."""


class ConfigError(FleetError):
    """A setting, file or argument is wrong; says what, where, got, expected and what to set."""


class IndexUnavailable(FleetError):
    """The index did not answer in time; the caller treats every lookup as a miss."""


class PullFailed(FleetError):
    """Blocks did not arrive; the engine recomputes them."""

    reason: ClassVar[str] = "failed"


class PeerLost(PullFailed):
    """The connection to the peer was refused, reset or closed."""

    reason = "peer_lost"


class PeerRefused(PullFailed):
    """The peer answered and said no."""

    reason = "refused"


class PeerBusy(PeerRefused):
    """The peer serves as many bytes or leases as it may; another source is the better choice."""

    reason = "busy"


class DeadlineExceeded(PullFailed):
    """The pull's own deadline passed."""

    reason = "deadline"


class EpochChanged(PullFailed):
    """The source is another life of the node than the one that was asked for."""

    reason = "epoch"


class LeaseExpired(PullFailed):
    """The source no longer promises to keep the blocks."""

    reason = "lease"


class LayoutMismatch(PullFailed):
    """Source and target disagree on the size or shape of a slot."""

    reason = "layout"


class ProtocolError(PullFailed):
    """The peer sent bytes that no correct peer of this version sends."""

    reason = "protocol"


class CorruptBlock(PullFailed):
    """A block's checksum, hash, length or namespace is not what it must be."""

    reason = "corrupt"


class PoolFull(FleetError):
    """No slot can be freed: every one is pinned or in quarantine."""


class Fenced(FleetError):
    """Another life of this node has joined; whatever this one publishes is void."""


class Overloaded(FleetError):
    """The fleet cannot take the request now."""

    def __init__(self, message: str, *, retry_after_s: float) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s
