"""Which fault of a chaos run is to blame for which error, and how long it was felt. Pure."""

import statistics
from collections.abc import Sequence

from chaos_faults import CLIENTS_NOTICE, Done
from chaos_oracle import Ended

GRACE_S = 12.0
"""So long after a fault a client's error may still come from it: restarts take seconds here."""


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


def _may_cause(fault: Done, error: Ended) -> bool:
    return (
        error.how not in ("wrong", "hung")
        and fault.fault.kind in CLIENTS_NOTICE
        and fault.began_s <= error.ended_s
        and error.began_s <= fault.ended_s + GRACE_S
    )
