"""How many inputs each edge was fed, and how much of the parsers they reached:

    python tests/fuzz/figures.py [EXAMPLES]      # inputs a property, 48 without it

Runs tests/fuzz with its property tests counted and the parsers' lines noted. Prints a table, and
one JSON object as the last line. Exits with pytest's status: a crash is a failed test.
"""

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "support"))

from fuzz_counts import inputs

ROOT = Path(__file__).parents[2]


def main() -> None:
    examples = sys.argv[1] if len(sys.argv) > 1 else "48"
    with tempfile.TemporaryDirectory(prefix="pf-fuzz-") as folder:
        path = Path(folder, "coverage.json")
        environ = {**os.environ, "FUZZ_EXAMPLES": examples, "FUZZ_COVERAGE": str(path)}
        command = [sys.executable, "-m", "pytest", "-q", "-p", "fuzz_coverage", "--timeout", "0"]
        command += ["--hypothesis-show-statistics", "tests/fuzz"]
        done = subprocess.run(command, cwd=ROOT, env=environ, capture_output=True, text=True)
        if not path.exists():
            sys.exit(done.stdout[-3000:] + done.stderr[-3000:])
        parsers = json.loads(path.read_text())
    fed, failed = inputs(done.stdout)
    if not fed:
        sys.exit("no counts in what hypothesis said:\n" + done.stdout[-3000:])
    for edge, count in sorted(fed.items()):
        print(f"{count:8,} inputs  {edge}")
    for name, module in sorted(parsers.items()):
        share = module["ran"] / module["lines"]
        print(f"{share:8.0%} of {module['lines']:4} lines  {name}  never: {module['never']}")
    lines = sum(module["lines"] for module in parsers.values())
    ran = sum(module["ran"] for module in parsers.values())
    if done.returncode:
        print(done.stdout[-4000:])
    report = {"inputs": fed, "crashes": failed, "covered": round(ran / lines, 3), "lines": lines}
    print(json.dumps(report | {"parsers": parsers}))
    sys.exit(done.returncode)


if __name__ == "__main__":
    main()
