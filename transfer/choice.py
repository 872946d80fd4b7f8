"""Which link a pull takes. Pure."""

from collections.abc import Collection

from prefixfleet.store.errors import PeerRefused

RDMA_LANES = ("rc", "dc", "ud", "srd", "gga")
"""First part of the names of UCX's transports that move bytes without the CPU."""


def has_rdma(lanes: str) -> bool:
    """Whether a link's lanes, e.g. "ucx:rc_mlx5/mlx5_0:1,tcp/eth0", contain an RDMA one."""
    names = lanes.partition(":")[2].split(",")
    return any(name.partition("/")[0].partition("_")[0] in RDMA_LANES for name in names)


def choose_link(
    offered: Collection[str], ours: Collection[str], *, forced: str | None = None, rdma: bool
) -> str:
    """Name of the link to use between a peer that offers some and us who have others.

    ``forced`` wins if both have it. ``rdma`` says whether our UCX has an RDMA lane.

    Raises:
        PeerRefused: the two have no link in common, or not the forced one.
    """
    common = set(offered) & set(ours)
    if forced is not None:
        if forced not in common:
            raise PeerRefused(
                f"link {forced!r} is forced; the peer offers {sorted(offered)}, "
                f"this node has {sorted(ours)}"
            )
        return forced
    order = ("ucx", "tcp") if rdma else ("tcp", "ucx")
    for name in (*order, *sorted(common)):
        if name in common:
            return name
    raise PeerRefused(
        f"no link in common: the peer offers {sorted(offered)}, this node has {sorted(ours)}"
    )
