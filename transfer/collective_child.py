"""The process of a node that takes part in collectives; its parent may kill it at any moment.

Gloo can hang for as long as its time limit when a rank dies or freezes, NCCL longer, and nothing
can interrupt either but the end of the process. It knows slots only: whether their bytes are right
is for the parent to prove.

Usage: python -m prefixfleet.transfer.collective_child SEGMENT_PATH [DEVICE]. Each line of its input
is one command in JSON, each line of its output one answer; it ends with its input.

A broadcast is a chain: each rank passes on what it gets, piece by piece, so that every link
carries the bytes once, and all at the same time. Neither has authentication: whoever
reaches the store's port can spoil a broadcast, though not a block that passes its check.
"""

import contextlib
import json
import mmap
import os
import sys
from collections.abc import Iterator, Sequence
from datetime import timedelta
from typing import Any

import torch

from prefixfleet.transfer.collective_lanes import (
    GLOO,
    NCCL,
    PIECE_BYTES,
    DeviceLane,
    HostLane,
    Lane,
    Untyped,
    agreed,
    dist,
    gloo_group,
    nccl_group,
    offer,
    pass_on,
)


class Child:
    """One node's end of its broadcasts. ``fault`` says why it does not use its device."""

    def __init__(self, path: str, device: str) -> None:
        fd = os.open(path, os.O_RDWR)
        try:
            self._memory = torch.frombuffer(mmap.mmap(fd, 0), dtype=torch.uint8)
        finally:
            os.close(fd)
        self._store: Untyped = None
        self._device, self._offer, self.fault = device, GLOO, ""
        try:
            self._offer = offer(device)
        except (RuntimeError, ValueError, AssertionError) as error:  # as torch tells of devices
            self.fault = str(error).splitlines()[0][:200]

    def answer(self, command: dict[str, Any]) -> dict[str, Any]:
        """Carry out one command."""
        if command["do"] == "host":
            return {"port": self._host(command["host"])}
        store = self._joined(command)
        roster, kind = self._meet(command, store)
        rank, size = roster.index(command["me"]), len(roster)
        lane = self._lane(kind, command, store, rank, size)
        pass_on(lane, rank, size)
        lane.close()
        return {"ranks": size, "lane": kind}

    def _host(self, host: str) -> int:
        """Open the store that the ranks meet at. Returns its port."""
        if self._store is None:
            self._store = dist.TCPStore(host, 0, None, True, wait_for_workers=False)
        return int(self._store.port)

    def _joined(self, command: dict[str, Any]) -> Untyped:
        if command["roster"]:
            assert self._store is not None, "host first"
            return self._store
        host, _, port = command["store"].rpartition(":")
        limit = timedelta(seconds=command["meet_s"])
        return dist.TCPStore(host, int(port), None, False, limit, wait_for_workers=False)

    def _meet(self, command: dict[str, Any], joined: Untyped) -> tuple[list[str], str]:
        """Names of the ranks in order, told by the first; and the lane that all of them have."""
        store = dist.PrefixStore(command["group"], joined)
        store.set_timeout(timedelta(seconds=command["meet_s"]))
        if command["roster"]:
            store.set("roster", json.dumps(command["roster"]))
        roster: list[str] = json.loads(store.get("roster"))
        store.set(f"offer {command['me']}", self._offer)
        return roster, agreed([store.get(f"offer {name}").decode() for name in roster])

    def _lane(
        self, kind: str, command: dict[str, Any], joined: Untyped, rank: int, size: int
    ) -> Lane:
        store = dist.PrefixStore(command["group"], joined)
        views = list(self._pieces(command["slots"], command["slot_bytes"], PIECE_BYTES[kind]))
        if kind == NCCL:
            return DeviceLane(nccl_group(store, rank, size, self._device), views, self._device)
        group = gloo_group(store, rank, size, command["host"], command["stall_s"])
        return HostLane(group, views)

    def _pieces(
        self, slots: Sequence[int], slot_bytes: int, piece_bytes: int
    ) -> Iterator[torch.Tensor]:
        """The slots' memory in pieces; -1 is a slot that is passed on and not kept."""
        for slot in slots:
            if slot < 0:
                memory = torch.empty(slot_bytes, dtype=torch.uint8)
            else:
                memory = self._memory[slot * slot_bytes : (slot + 1) * slot_bytes]
            for start in range(0, slot_bytes, piece_bytes):
                yield memory[start : start + piece_bytes]


def main() -> None:
    """Answer commands until the input ends, or nobody hears the answers."""
    child = Child(sys.argv[1], sys.argv[2] if len(sys.argv) > 2 else "")
    with contextlib.suppress(BrokenPipeError):
        _say({"ready": True, "fault": child.fault})
        for line in sys.stdin:
            _say(_reply(child, json.loads(line)))


def _reply(child: Child, command: dict[str, Any]) -> dict[str, Any]:
    try:
        return child.answer(command)
    except (RuntimeError, ValueError, OSError) as error:  # torch's errors are RuntimeErrors
        return {"failed": str(error).splitlines()[0][:200]}


def _say(reply: dict[str, Any]) -> None:
    sys.stdout.write(json.dumps(reply) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
