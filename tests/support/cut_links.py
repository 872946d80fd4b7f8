"""Pulls between two hosts made of namespaces, whose cable is pulled in the middle."""

import json
import sys
from pathlib import Path

import netns
from broken_pulls import BLOCKS, Trial

FOLDER = Path(__file__).parent
RATE = ["tbf", "rate", "1gbit", "burst", "128k", "latency", "50ms"]
"""So that a pull lasts longer than pulling the cable."""


def with_ucx(device: str) -> list[str]:
    """What lets UCX work on such a host: it looks for devices in /sys, takes namespaces of one
    host for one host, and speaks where our answers belong."""
    return [
        *("sh", "-c", 'mount -t sysfs none /sys && exec "$@"', "sh"),
        *("env", f"UCX_NET_DEVICES={device}", "UCX_TCP_BRIDGE_ENABLE=y", "UCX_LOG_FILE=stderr"),
    ]


def cut(folder: Path, kind: str, count: int) -> list[Trial]:
    """``ip link set down`` on the switch's end of the source's cable, and up after the pull."""
    with netns.Network.of(folder, "near", "far") as network:
        near, far = network.hosts
        far.run("tc", "qdisc", "add", "dev", "eth0", "root", *RATE)
        source = far.talk(
            *with_ucx("eth0"),
            sys.executable,
            FOLDER / "pull_source.py",
            kind,
            str(BLOCKS),
            far.address,
        )
        assert source.stdout is not None
        contacts = json.loads(source.stdout.readline())["contacts"]
        puller = near.talk(
            *with_ucx("switch"),
            *(sys.executable, FOLDER / "broken_pulls.py", kind),
            *(next(iter(contacts.values())), str(count)),
        )
        assert puller.stdout is not None
        assert puller.stdin is not None
        while not isinstance(told := json.loads(puller.stdout.readline()), list):
            (network.cut if told == "break" else network.heal)(far)
            puller.stdin.write("done\n")
            puller.stdin.flush()
        source.communicate(timeout=60)
        puller.communicate(timeout=60)
        return [Trial(**trial) for trial in told]
