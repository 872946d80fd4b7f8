"""Which link a pull takes."""

import pytest

from prefixfleet.store.errors import PeerRefused
from prefixfleet.transfer.choice import choose_link, has_rdma
from prefixfleet.transfer.estimates import Speed


@pytest.mark.parametrize(
    ("lanes", "expected"),
    [
        ("ucx:rc_mlx5/mlx5_0:1,tcp/eth0", True),
        ("ucx:tcp/eth0,dc_mlx5/mlx5_1:1", True),
        ("ucx:srd/efa0", True),
        ("ucx:ud_verbs/mlx5_0:1", True),
        ("ucx:tcp/eth0,tcp/lo", False),
        ("ucx:sysv/memory,cma/memory", False),
        ("ucx:tcp/eth0,cuda_ipc/cuda", True),
        ("tcp", False),
        ("", False),
    ],
)
def test_rdma_is_seen_in_the_lanes(lanes, expected):
    assert has_rdma(lanes) is expected


BOTH = ["tcp", "ucx"]
ALL = [*BOTH, "shm"]


def chosen(offered, ours=ALL, **known):
    choice = choose_link(offered, ours, **known)
    return choice.link, choice.why


def test_a_forced_link_wins_or_the_pull_is_refused():
    assert chosen(BOTH, forced="ucx", avoid=["ucx"]) == ("ucx", "forced")
    with pytest.raises(PeerRefused, match="forced"):
        chosen(["tcp"], forced="ucx")


def test_shared_memory_comes_before_everything():
    assert chosen(ALL, fast=["ucx"]) == ("shm", "same host")


def test_a_fast_lane_comes_before_what_was_measured():
    speeds = {"tcp": Speed(bytes_per_s=9e9), "ucx": Speed(bytes_per_s=1e9)}

    choice = chosen(BOTH, fast=["ucx"], speeds=speeds, size_bytes=1)

    assert choice == ("ucx", "RDMA or CUDA lane")


def test_sockets_are_taken_while_nothing_was_measured():
    assert chosen(BOTH) == ("tcp", "nothing measured yet")
    assert chosen(["ucx"]) == ("ucx", "the only one")


@pytest.mark.parametrize(("size_bytes", "expected"), [(10_000, "tcp"), (100_000_000, "ucx")])
def test_what_was_measured_decides_by_the_size_of_the_pull(size_bytes, expected):
    speeds = {
        "tcp": Speed(bytes_per_s=2e9, setup_s=0.001),
        "ucx": Speed(bytes_per_s=4e9, setup_s=0.005),
    }

    choice = chosen(BOTH, speeds=speeds, size_bytes=size_bytes)

    assert choice == (expected, "measured fastest")


def test_a_link_that_was_measured_comes_before_one_that_was_not():
    assert chosen(BOTH, speeds={"ucx": Speed(bytes_per_s=1e6)})[0] == "ucx"


def test_a_link_that_failed_lately_comes_last():
    assert chosen(ALL, avoid=["shm"])[0] == "tcp"
    assert chosen(BOTH, avoid=["tcp"]) == ("ucx", "the others failed lately")
    assert chosen(["tcp"], avoid=["tcp"])[0] == "tcp"
    assert chosen(ALL, avoid=ALL)[0] == "shm"


def test_without_a_link_in_common_the_pull_is_refused():
    with pytest.raises(PeerRefused, match="no link in common"):
        chosen(["ucx"], ["tcp"])
