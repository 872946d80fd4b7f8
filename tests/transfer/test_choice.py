"""Which link a pull takes."""

import pytest

from prefixfleet.store.errors import PeerRefused
from prefixfleet.transfer.choice import choose_link, has_rdma


@pytest.mark.parametrize(
    ("lanes", "expected"),
    [
        ("ucx:rc_mlx5/mlx5_0:1,tcp/eth0", True),
        ("ucx:tcp/eth0,dc_mlx5/mlx5_1:1", True),
        ("ucx:srd/efa0", True),
        ("ucx:ud_verbs/mlx5_0:1", True),
        ("ucx:tcp/eth0,tcp/lo", False),
        ("ucx:sysv/memory,cma/memory,cuda_ipc/cuda", False),
        ("tcp", False),
        ("", False),
    ],
)
def test_rdma_is_seen_in_the_lanes(lanes, expected):
    assert has_rdma(lanes) is expected


def test_a_forced_link_wins_or_the_pull_is_refused():
    assert choose_link(["tcp", "ucx"], ["tcp", "ucx"], forced="ucx", rdma=False) == "ucx"
    with pytest.raises(PeerRefused, match="forced"):
        choose_link(["tcp"], ["tcp", "ucx"], forced="ucx", rdma=True)


def test_ucx_is_taken_where_it_has_rdma_else_sockets():
    both = ["tcp", "ucx"]

    assert choose_link(both, both, rdma=True) == "ucx"
    assert choose_link(both, both, rdma=False) == "tcp"
    assert choose_link(["ucx"], both, rdma=False) == "ucx"


def test_without_a_link_in_common_the_pull_is_refused():
    with pytest.raises(PeerRefused, match="no link in common"):
        choose_link(["ucx"], ["tcp"], rdma=False)
