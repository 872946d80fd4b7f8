"""Lookups of the connector: which leading blocks of a request are in the node's pool, pinned.

A lookup ends exactly once: with what the daemon found, or as a miss with the reason. Must not
know vLLM.
"""

from collections.abc import Callable, Sequence
from concurrent.futures import wait
from dataclasses import asdict
from typing import Annotated

import msgspec

from prefixfleet.cluster.engine_channel import join_hashes
from prefixfleet.cluster.engine_client import EngineClient
from prefixfleet.store.chain import BlockHash
from prefixfleet.store.errors import DeadlineExceeded, FleetError, PeerLost, PullFailed
from prefixfleet.store.records import PullPlan

LOCAL_BUDGET_S = 0.25
"""For a lookup without a plan, which would know what the blocks are worth: the node's memory, and
what comes from its disk meanwhile."""
MAX_PULL_S = 60.0
"""Whatever a plan says, for its pull and for what the node reads from its disk."""
GRACE_S = 1.0
"""How much later than its budget the daemon's answer may come. Later ends the connection and all
that it holds, so a machine that is merely busy must stay below it."""
TELL_S = 5.0
IDLE_WAIT_S = 0.001
"""Once a step, when the engine has nothing else to do than wait for a lookup."""

Count = Annotated[int, msgspec.Meta(ge=0)]
Measure = Annotated[float, msgspec.Meta(ge=0)]


class Found(msgspec.Struct, frozen=True, kw_only=True):
    """The daemon's answer: ``slots`` of leading blocks, the ``local`` ones before the pulled."""

    blocks: Count = 0
    slots: tuple[Count, ...] = ()
    local: Count = 0
    pulled: Count = 0
    pulled_bytes: Count = 0
    pull_s: Measure = 0.0
    link: str = ""
    failure: str = ""


class Lookup:
    """Asks when it is made. Owned by the scheduler half; `release` it when its slots are copied."""

    def __init__(
        self,
        client: EngineClient,
        name: str,
        chain: Sequence[BlockHash],
        plan: PullPlan | None,
        clock: Callable[[], float],
    ) -> None:
        self.chain = tuple(chain)
        self._client = client
        self._name = name
        self._clock = clock
        self._found: Found | None = None
        self._released = False
        budget_s = min(plan.budget_s, MAX_PULL_S) if plan else LOCAL_BUDGET_S
        # the client ends the question at its own limit; this one holds if its thread is gone
        self._deadline = clock() + budget_s + 2 * GRACE_S
        self._answer = client.ask(
            "prepare",
            within_s=budget_s + GRACE_S,
            request=name,
            chain=join_hashes(list(chain)),
            plan=asdict(plan) if plan else None,
            budget_s=budget_s,
        )

    def poll(self, wait_s: float = 0.0) -> Found | None:
        """What was found; None while the answer is out, which it is for a bounded time."""
        if self._found is None:
            if wait_s:
                wait([self._answer], wait_s)
            if self._answer.done():
                self._found = self._read()
            elif self._clock() >= self._deadline:
                self._miss(DeadlineExceeded.reason)
        return self._found

    def release(self, copied: int = 0, copy_s: float = 0.0) -> None:
        """Let the daemon unpin what it found or will find; repeated calls do nothing.

        ``copied`` blocks of it took ``copy_s`` to copy: the daemon learns from that.
        """
        if not self._released:
            self._released = True
            self._client.ask(
                "release", within_s=TELL_S, request=self._name, copied=copied, copy_s=copy_s
            )

    def _miss(self, failure: str) -> None:
        self._found = Found(failure=failure)
        self.release()

    def _read(self) -> Found:
        try:
            found = msgspec.convert(self._answer.result(), Found)
        except PeerLost:
            return Found(failure="daemon_lost")
        except PullFailed as error:
            return Found(failure=error.reason)
        except (FleetError, msgspec.ValidationError):
            return Found(failure="protocol")
        if not found.blocks == len(found.slots) == found.local + found.pulled <= len(self.chain):
            return Found(failure="protocol")
        return found


class WaitingLookups:
    """The lookups of an engine's requests, one each. Owned by the scheduler half, in its thread."""

    def __init__(self) -> None:
        self._of: dict[str, Lookup] = {}
        self._may_wait = True

    def start(self, request_id: str, lookup: Lookup) -> None:
        """The request's lookup from now on; it had none, or `release` ended that."""
        self._of[request_id] = lookup

    def of(self, request_id: str) -> Lookup | None:
        """The request's lookup that was not released."""
        return self._of.get(request_id)

    def poll(self, lookup: Lookup) -> Found | None:
        """As `Lookup.poll`; waits `IDLE_WAIT_S` where `next_step` allowed it."""
        found = lookup.poll()
        if found is None and self._may_wait:
            self._may_wait = False
            found = lookup.poll(IDLE_WAIT_S)
        return found

    def next_step(self, *, idle: bool) -> None:
        """A step of the engine was planned; ``idle``: it computes nothing."""
        self._may_wait = idle

    def release(self, request_id: str, copied: int = 0, copy_s: float = 0.0) -> None:
        """`Lookup.release` of the request's lookup, if it has one."""
        if (lookup := self._of.pop(request_id, None)) is not None:
            lookup.release(copied, copy_s)

    def forget(self) -> None:
        """The connection of all of them has ended, and what was pinned with it."""
        self._of.clear()
