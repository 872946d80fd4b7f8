"""Simulated points that outlive the run that computed them: one JSON object a line in a file.

The whole grid takes longer than a machine is free; a run that was ended is begun anew and computes
what is missing. What is kept is of the code that computed it: after a change, another file.
"""

import json
from collections.abc import Iterable, Iterator
from concurrent.futures import Executor, as_completed
from pathlib import Path
from typing import Any

from policy_grid import Point, run

Kept = tuple[Point, dict[str, Any]]


def kept(path: Path) -> Iterator[Kept]:
    """Points that ``path`` holds with their figures; none if there is no such file.

    Raises `ValueError`, with the line's number, for a line that is none of ours.
    """
    lines = path.read_text().splitlines() if path.exists() else []
    for number, line in enumerate(lines, 1):
        try:
            read = json.loads(line)
            yield Point(**read["point"]), read["figures"]
        except (ValueError, TypeError, KeyError) as error:
            raise ValueError(f"{path}, line {number}: expected a kept point: {error}") from error


def computed(wanted: Iterable[Point], pool: Executor, path: Path | None) -> Iterator[Kept]:
    """Each point with its figures: first those that ``path`` holds; others are written there as
    soon as they are known. All are kept in no file where ``path`` is None."""
    have = dict(kept(path)) if path else {}
    points = dict.fromkeys(wanted)
    yield from ((point, have[point]) for point in points if point in have)
    running = {pool.submit(run, point): point for point in points if point not in have}
    for done in as_completed(running):
        point, figures = running[done], done.result()
        if path:
            with path.open("a") as file:
                file.write(json.dumps({"point": point._asdict(), "figures": figures}) + "\n")
        yield point, figures
