"""Which link a pull takes. Pure."""

from collections.abc import Collection, Mapping

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


def choose_link(
    offered: Collection[str],
    ours: Collection[str],
    *,
    forced: str | None = None,
    fast: Collection[str] = (),
    avoid: Collection[str] = (),
    speeds: Mapping[str, Speed] | None = None,
    size_bytes: int = 0,
) -> str:
    """Name of the link to use to a peer that offers some of ours.

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
    known = speeds or {}

    def rank(name: str) -> tuple[bool, bool, bool, float, bool]:
        seconds = known.get(name, Speed()).seconds(size_bytes)
        return name in avoid, name != LOCAL, name not in fast, seconds, name != SAFE

    return min(common, key=rank)
