"""How many inputs each edge got, read from what hypothesis says at the end of a pytest run."""

import re
from collections import Counter

PROPERTY = re.compile(r"^tests/fuzz/test_(\w+)\.py::(\w+)(?:\[(.*)\])?:$")
COUNT = re.compile(r"(\d+) passing, (\d+) failing, and (\d+) invalid test cases")


def inputs(statistics: str) -> tuple[dict[str, int], int]:
    """Inputs by edge, and how many failed, of hypothesis' statistics."""
    fed: Counter[str] = Counter()
    failed, edge = 0, ""
    for line in statistics.splitlines():
        if found := PROPERTY.match(line.strip()):
            file, test, parameter = found.groups()
            edge = parameter if file == "parsers" and parameter else f"{file}: {test}"
        elif edge and (count := COUNT.search(line)):
            passing, failing, invalid = map(int, count.groups())
            fed[edge] += passing + failing + invalid
            failed += failing
    return dict(fed), failed
