"""A lineup as ranks for one prompt: of workers that hold nothing of it only the soonest count.

Whoever holds something of the prompt, or will, is compared by itself; so is who is in no group.
The others of a group differ in when they are free only.
"""

import heapq
from bisect import bisect_left
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from operator import attrgetter

from msgspec import structs

from prefixfleet.router.candidates import Findings, candidate, over_links
from prefixfleet.router.charge import Load
from prefixfleet.router.decision import Candidate, Decision, Source
from prefixfleet.router.lineup import Group, Lineup, Links
from prefixfleet.router.policy import Rank, least_seconds
from prefixfleet.router.pull_or_compute import best_for
from prefixfleet.router.worker import Worker

BY_BOUND = attrgetter("bound_s")


class Ranks:
    """Of one prompt, at one moment. ``findings`` are by namespace; ``single`` makes a candidate
    of a worker that is compared by itself, given its seconds until it is free; the nodes' records
    are ``told_s`` seconds old."""

    def __init__(
        self,
        tokens: int,
        lineup: Lineup,
        findings: Mapping[bytes, Findings],
        now_s: float,
        told_s: float,
        load: Callable[[str], Load],
        single: Callable[[Worker, float, Load], Candidate],
    ) -> None:
        self._tokens, self._lineup, self._findings = tokens, lineup, findings
        self._now_s, self._told_s, self._load, self._single = now_s, told_s, load, single
        self._linked: dict[tuple[bytes, int], Sequence[Source]] = {}
        self._judged: dict[tuple[int, float], Decision] = {}

    def __iter__(self) -> Iterator[Rank]:
        """In the order of their bounds."""
        apart = self._apart()
        known = [self._rank_of(worker) for worker in apart.values()]
        computing = []
        for group in self._lineup.groups:
            known += self._not_computing(group, apart)
            if group.computing:
                computing.append(self._computing(group, apart))
        known.sort(key=BY_BOUND)
        return heapq.merge(known, *computing, key=BY_BOUND) if computing else iter(known)

    def _apart(self) -> dict[str, Worker]:
        """Workers that are compared by themselves, by name."""
        lineup = self._lineup
        found = {worker.name: worker for worker in lineup.single}
        for findings in self._findings.values():
            for node in findings.nodes():
                found |= {worker.name: worker for worker in lineup.on_node.get(node, ())}
            mine = (lineup.workers.get(name) for name in findings.own)
            found |= {worker.name: worker for worker in mine if worker}
        return found

    def _rank_of(self, worker: Worker) -> Rank:
        busy_s = self._lineup.busy_s(worker.name)
        findings = self._findings[worker.kind]
        reach = max(
            findings.reach, findings.hit(worker.record.node), findings.own.get(worker.name, 0)
        )
        prefill = self._lineup.prefill(worker)
        return Rank(
            bound_s=least_seconds(self._tokens, busy_s, prefill, reach, worker.block_tokens),
            judge=lambda _: best_for(
                self._tokens, self._single(worker, busy_s, self._load(worker.name))
            ),
        )

    def _not_computing(self, group: Group, apart: Collection[str]) -> Iterator[Rank]:
        """Of a group those that are free, and those that generate, without those ``apart``."""
        taken, generating = self._lineup.positions(group, apart)
        late = [name for name in self._late(group) if name not in apart]
        free = len(group.free) - len(taken)

        def judge_free(number: int) -> Decision:
            name = group.free[_nth(number, taken)] if number < free else late[number - free]
            return self._judge(group, name, 0.0)

        if count := free + len(late):
            yield Rank(bound_s=self._bound_s(group, 0.0), judge=judge_free, count=count)
        if count := len(group.generating) - len(generating):
            step_s, _ = group.generating[_nth(0, generating)]
            yield Rank(
                bound_s=self._bound_s(group, step_s),
                judge=lambda number: self._judge_generating(group, _nth(number, generating)),
                count=count,
                alike=False,
            )

    def _late(self, group: Group) -> list[str]:
        """Those that should be done by now: as good as free, if they generate nothing besides."""
        end = bisect_left(group.computing, (self._now_s, ""))
        return [name for _, name in group.computing[:end] if not self._lineup.step_s(name)]

    def _judge_generating(self, group: Group, position: int) -> Decision:
        step_s, name = group.generating[position]
        return self._judge(group, name, step_s)

    def _computing(self, group: Group, apart: Collection[str]) -> Iterator[Rank]:
        late = set(self._late(group))
        for free_at_s, name in group.computing:
            if name not in apart and name not in late:
                yield Rank(
                    bound_s=self._bound_s(group, max(0.0, free_at_s - self._now_s)),
                    judge=lambda _, name=name: self._judge(  # type: ignore[misc]
                        group, name, self._lineup.busy_s(name)
                    ),
                )

    def _bound_s(self, group: Group, busy_s: float) -> float:
        reach = self._findings[group.worker.kind].reach
        return least_seconds(self._tokens, busy_s, group.prefill, reach, group.worker.block_tokens)

    def _judge(self, group: Group, name: str, busy_s: float) -> Decision:
        """Once for all of a group that are busy for as long."""
        key = (id(group), busy_s)
        if found := self._judged.get(key):
            return structs.replace(found, worker=name)
        worker = self._lineup.workers[name]
        findings = self._findings[worker.kind]
        sources = self._over_links(worker.kind, group.links)
        load = self._load(name)
        seen = candidate(worker, findings, load, busy_s, group.prefill, sources)
        self._judged[key] = decision = best_for(self._tokens, seen)
        return decision

    def _over_links(self, kind: bytes, links: Links) -> Sequence[Source]:
        """The sources as a group sees them: none of it is one, or it would be compared apart."""
        key = (kind, id(links))
        if key not in self._linked:
            sources = self._findings[kind].sources
            self._linked[key] = over_links("", links, sources, self._told_s)
        return self._linked[key]


def _nth(number: int, without: Sequence[int]) -> int:
    """Position of the ``number``-th that is at none of the positions ``without``, in order."""
    for position in without:
        if position > number:
            break
        number += 1
    return number
