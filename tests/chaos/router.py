"""A router of a chaos run, as a process: the real one, with a wall clock that may be set.

Usage: router.py SKEW_FILE; settings from the environment.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "support"))

from skewed_clock import install

install(Path(sys.argv.pop()))

from prefixfleet.router.__main__ import main  # noqa: E402 - after the clock is set

main()
