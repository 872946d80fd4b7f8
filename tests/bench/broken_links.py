"""What becomes of pulls whose source breaks in the middle: hangs, wrong bytes, time to know.

Run: python tests/bench/broken_links.py [--json] [--count 5] [--kind tcp] [--way kill]
Kills (-9) and freezes (SIGSTOP) the source, and pulls its cable (`ip link set down`; needs
namespaces). Times run from the break to the end of the pull, when the rest will be recomputed.
The last line is one JSON object.
"""

import argparse
import asyncio
import json
import sys
import tempfile
from pathlib import Path

sys.path += [str(Path(__file__).parents[1] / "support")]

import broken_pulls
import cut_links
import netns
from links import MAKERS


def killed(kind, count):
    return broken_pulls.summary(asyncio.run(broken_pulls.killed(kind, count)))


def frozen(kind, count):
    return broken_pulls.summary(asyncio.run(broken_pulls.frozen(kind, count)))


def cut(kind, count):
    if reason := netns.missing():
        return {"absent": reason}
    if kind == "shm":
        return {"absent": "between nodes of one host there is no cable"}
    with tempfile.TemporaryDirectory() as folder:
        return broken_pulls.summary(cut_links.cut(Path(folder), kind, count))


WAYS = {"kill": killed, "freeze": frozen, "link_down": cut}


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", action="store_true", help="print the JSON line only")
    parser.add_argument("--count", type=int, default=5, help="times each")
    parser.add_argument("--kind", choices=MAKERS, action="append", help="links; default: tcp")
    parser.add_argument("--way", choices=WAYS, action="append", help="default: all")
    args = parser.parse_args()
    figures = {}
    for kind in args.kind or ["tcp"]:
        figures[kind] = {way: WAYS[way](kind, args.count) for way in args.way or WAYS}
        if not args.json:
            print(f"{kind}: {figures[kind]}", flush=True)
    print(json.dumps(figures))


if __name__ == "__main__":
    main()
