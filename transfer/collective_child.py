"""The process of a node that takes part in collectives; its parent may kill it at any moment.

Gloo can hang for as long as its time limit when a rank dies or freezes, and nothing can interrupt
it but the end of the process. Usage: python -m prefixfleet.transfer.collective_child SEGMENT_PATH.
Each line of its input is one command in JSON, each line of its output one answer; it ends with its
input. It knows slots only: whether their bytes are right is for the parent to prove.

A broadcast is a chain: each rank passes on what it gets, piece by piece, so that every link
carries the bytes once, and all at the same time. Gloo has no authentication: whoever reaches the
store's port can spoil a broadcast, though not a block that passes its check.
"""

import contextlib
import json
import mmap
import os
import sys
from collections import deque
from collections.abc import Iterator, Sequence
from datetime import timedelta
from typing import Any, TypeAlias

import torch
import torch.distributed

Untyped: TypeAlias = Any
dist: Untyped = torch.distributed  # most of what is used here has no types

PIECE_BYTES = 256 * 1024
"""A slot travels in pieces of so many bytes; the last rank gets the first after as many pieces as
there are ranks before it."""
WINDOW = 16
"""Pieces of one rank under way, each way."""


class Child:
    """One node's end of its broadcasts."""

    def __init__(self, path: str) -> None:
        fd = os.open(path, os.O_RDWR)
        try:
            self._memory = torch.frombuffer(mmap.mmap(fd, 0), dtype=torch.uint8)
        finally:
            os.close(fd)
        self._store: Untyped = None

    def answer(self, command: dict[str, Any]) -> dict[str, Any]:
        """Carry out one command."""
        if command["do"] == "host":
            return {"port": self._host(command["host"])}
        store = self._joined(command)
        roster = self._meet(command, store)
        views = list(self._pieces(command["slots"], command["slot_bytes"]))
        rank = roster.index(command["me"])
        group = _group(command, store, rank, len(roster))
        pass_on(group, rank, len(roster), views)
        del group  # nothing of it writes into the segment any more
        return {"ranks": len(roster)}

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

    def _meet(self, command: dict[str, Any], joined: Untyped) -> list[str]:
        """Names of the ranks in order: told by the first, waited for by the others."""
        store = dist.PrefixStore(command["group"], joined)
        if command["roster"]:
            store.set("roster", json.dumps(command["roster"]))
        roster: list[str] = json.loads(store.get("roster"))
        return roster

    def _pieces(self, slots: Sequence[int], slot_bytes: int) -> Iterator[torch.Tensor]:
        """The slots' memory in pieces; -1 is a slot that is passed on and not kept."""
        for slot in slots:
            if slot < 0:
                memory = torch.empty(slot_bytes, dtype=torch.uint8)
            else:
                memory = self._memory[slot * slot_bytes : (slot + 1) * slot_bytes]
            for start in range(0, slot_bytes, PIECE_BYTES):
                yield memory[start : start + PIECE_BYTES]


def _group(command: dict[str, Any], store: Untyped, rank: int, size: int) -> Untyped:
    options = dist.ProcessGroupGloo._Options()
    options._timeout = timedelta(seconds=command["stall_s"])
    options._devices = [dist.ProcessGroupGloo.create_device(hostname=command["host"])]
    return dist.ProcessGroupGloo(dist.PrefixStore(command["group"], store), rank, size, options)


def pass_on(group: Untyped, rank: int, size: int, pieces: Sequence[torch.Tensor]) -> None:
    """Get every piece from the rank before, if there is one, and give it to the one behind.

    Raises `RuntimeError` when a neighbour is gone or moves nothing for the group's time limit.
    """
    receiving: deque[Any] = deque()
    sending: deque[Any] = deque()
    posted = 0
    for i, piece in enumerate(pieces):
        while rank > 0 and posted < min(len(pieces), i + WINDOW):
            receiving.append(group.recv([pieces[posted]], rank - 1, posted))
            posted += 1
        if rank > 0:
            receiving.popleft().wait()
        if rank + 1 < size:
            sending.append(group.send([piece], rank + 1, i))
        if len(sending) > WINDOW:
            sending.popleft().wait()
    for work in sending:
        work.wait()


def main() -> None:
    """Answer commands until the input ends, or nobody hears the answers."""
    child = Child(sys.argv[1])
    with contextlib.suppress(BrokenPipeError):
        _say({"ready": True})
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
