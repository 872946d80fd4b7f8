"""Which link a pull takes. Pure."""

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass

from prefixfleet.store.errors import PeerRefused
from prefixfleet.transfer.estimates import Speed

RDMA_LANES = ("rc", "dc", "ud", "srd", "gga", "cuda")
"""First part of the names of UCX's transports that move bytes without the CPU."""
LOCAL = "shm"
"""The link that exists only between nodes of one host: nothing is faster than a copy."""
SAFE = "tcp"
"""The link to take while nothing was measured: it works everywhere."""


def has_rdma(lanes: str) -> bool:
    """Whether a link's lanes, e.g. "ucx:rc_mlx5/mlx5_0:1,tcp/eth0", bypass the CPU."""
    names = lanes.partition(":")[2].split(",")
    return any(name.partition("/")[0].partition("_")[0] in RDMA_LANES for name in names)


@dataclass(frozen=True, slots=True)
class Choice:
    """A link by its name, and why it: one of the words below."""

    link: str
    why: str


FORCED = "forced"
ALONE = "the only one"
SAME_HOST = "same host"
FAST_LANE = "RDMA or CUDA lane"
MEASURED = "measured fastest"
UNKNOWN = "nothing measured yet"
AVOIDED = "the others failed lately"


def choose_link(
    offered: Collection[str],
    ours: Collection[str],
    *,
    forced: str | None = None,
    fast: Collection[str] = (),
    avoid: Collection[str] = (),
    speeds: Mapping[str, Speed] | None = None,
    size_bytes: int = 0,
) -> Choice:
    """The link to use to a peer that offers some of ours.

    ``forced`` wins if both have it; then those that are not to be avoided; then shared memory,
    then one of ``fast`` (those of ours with an RDMA lane), then what is expected to bring
    ``size_bytes`` soonest by the learned ``speeds``, then plain sockets.

    Raises:
        PeerRefused: the two have no link in common, or not the forced one.
    """
    common = sorted(set(offered) & set(ours))
    if forced is not None:
        common = [name for name in common if name == forced]
    if not common:
        what = f"link {forced!r} is forced" if forced else "no link in common"
        raise PeerRefused(
            f"{what}: the peer offers {sorted(offered)}, this node has {sorted(ours)}"
        )
    if forced is not None:
        return Choice(forced, FORCED)
    good = [name for name in common if name not in avoid] or common
    seconds = {name: (speeds or {}).get(name, Speed()).seconds(size_bytes) for name in good}
    best = min(
        good, key=lambda name: (name != LOCAL, name not in fast, seconds[name], name != SAFE)
    )
    return Choice(best, _why(best, common, good, fast, seconds))


def _why(
    best: str,
    common: Collection[str],
    good: Collection[str],
    fast: Collection[str],
    seconds: Mapping[str, float],
) -> str:
    if len(common) == 1:
        return ALONE
    if best == LOCAL:
        return SAME_HOST
    if best in fast:
        return FAST_LANE
    if len(good) == 1:
        return AVOIDED
    return UNKNOWN if seconds[best] == math.inf else MEASURED
