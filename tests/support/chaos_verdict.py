"""Which fault of a chaos run is to blame for which error, how long it was felt, and what may not be
at all. Pure."""

import statistics
from collections import Counter
from collections.abc import Sequence
from typing import Any

from chaos_client import BROKEN_STREAMS, HUNG, OK, WRONG, Ended, Request, errors
from chaos_plan import Done

GRACE_S = 12.0
"""So long after a fault a client's error may still come from it: restarts take seconds here."""
CLIENTS_NOTICE = {
    "kill engine", "kill router", "freeze engine", "freeze router", "cut http", "freeze http",
    "cut redis link", "freeze redis link", "freeze redis", "restart redis empty",
}  # fmt: skip
"""Faults during which a plain client may be refused: its router is gone, or a part of the engines
is, and the list of the others cannot be read."""
BREAK_STREAMS = {"kill engine", "kill router", "cut http"}


def recoveries(done: Sequence[Done], bad: Sequence[Ended]) -> tuple[dict[int, float], list[Ended]]:
    """(seconds from the beginning of ``done[i]`` to the end of its last error, or 0; errors that
    no fault explains).

    Faults overlap: an error is blamed on the latest of those that clients may notice, else each
    fault would seem to last as long as the errors of those that came after it.
    """
    felt = dict.fromkeys(range(len(done)), 0.0)
    unexplained = []
    for error in bad:
        causes = [i for i, fault in enumerate(done) if _may_cause(fault, error)]
        if not causes:
            unexplained.append(error)
            continue
        latest = max(causes, key=lambda i: done[i].began_s)
        felt[latest] = max(felt[latest], error.ended_s - done[latest].began_s)
    return felt, unexplained


def spread(seconds: Sequence[float]) -> dict[str, float]:
    """Median and largest of ``seconds``; 0 if there are none."""
    return {
        "p50": round(statistics.median(seconds), 2) if seconds else 0.0,
        "max": round(max(seconds, default=0.0), 2),
    }


def judged(requests: Sequence[Request]) -> dict[str, Any]:
    """What clients saw: plain ones, those behind a load balancer, and those that also retry."""
    sent = [ended for request in requests for ended in request.sent]
    return {
        "requests": len(requests),
        "wrong": sum(ended.how == WRONG for ended in sent),
        "hung": sum(ended.how == HUNG for ended in sent),
        "unclear": sum(ended.how.startswith("unclear") for ended in sent),
        "errors_plain": errors([request.plain for request in requests]),
        "errors_behind_a_balancer": errors([request.balanced for request in requests]),
        "errors_official": errors([request.official for request in requests]),
        "streams_broken": dict(Counter(e.how for e in sent if e.how in BROKEN_STREAMS)),
    }


def of_faults(done: Sequence[Done], requests: Sequence[Request]) -> dict[str, Any]:
    """The faults by kind, which errors they do not explain, and how long they were felt."""
    bad = [ended for request in requests for ended in request.sent if ended.how != OK]
    felt, unexplained = recoveries(done, bad)
    return {
        "faults": len(done),
        "by_kind": dict(sorted(Counter(d.fault.kind for d in done).items())),
        "errors_without_a_fault": [f"{e.began_s:.1f} s {e.how}" for e in unexplained[:20]],
        "recover_s": spread([s for s in felt.values() if s > 0])
        | {"faults_that_clients_noticed": sum(s > 0 for s in felt.values())},
        "fault_s": spread([d.ended_s - d.began_s for d in done]),
    }


def failures(report: dict[str, Any]) -> list[str]:
    """What must not be, in words."""
    empty = ("wrong", "hung", "unclear", "errors_official", "errors_without_a_fault",
             "leaked", "left_behind", "exit_codes", "tracebacks_in")  # fmt: skip
    wrong = [key for key in empty if report[key]]
    wrong += [] if report["hit_rate_returned"] else ["hit_rate_returned"]
    wrong += [] if report["books"]["balanced"] else ["books"]
    for outage in report["outages"]:
        name = outage["outage"]
        wrong += [f"{name}: {key}" for key in ("wrong", "hung", "unclear") if outage[key]]
        wrong += [] if outage["recovered"] else [f"{name}: recovered"]
    return wrong


def _may_cause(fault: Done, error: Ended) -> bool:
    kinds = BREAK_STREAMS if error.how in BROKEN_STREAMS else CLIENTS_NOTICE
    return (
        error.how not in (WRONG, HUNG)
        and not error.how.startswith("unclear")
        and fault.fault.kind in kinds
        and fault.began_s <= error.ended_s
        and error.began_s <= fault.ended_s + GRACE_S
    )
