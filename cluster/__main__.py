"""The command line: ``prefixfleet``. Imports no engine, Ray or torch before they are needed."""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from prefixfleet.cluster import commands
from prefixfleet.store.errors import FleetError

PASSED_ON = {
    "router": ("prefixfleet.router", "run a router (settings by PREFIXFLEET_ROUTER_*)"),
    "replay": ("prefixfleet.router.replay", "replay a trace against any OpenAI endpoint"),
    "top": ("prefixfleet.router.top", "watch a router in the terminal"),
    "plan": ("prefixfleet.router.plan", "what a shared cache would bring a trace, and cost"),
    "simulate": ("prefixfleet.router.simulate", "put a trace through a simulated fleet"),
}


def parser() -> argparse.ArgumentParser:
    """The command line."""
    top = argparse.ArgumentParser(
        prog="prefixfleet", description="One KV cache for a fleet of LLM engines."
    )
    verbs = top.add_subparsers(dest="verb", required=True, metavar="COMMAND")
    up = verbs.add_parser("up", help="start a fleet on this machine")
    up.add_argument("--nodes", type=_count, default=2, help="node daemons, an engine each")
    up.add_argument("--model", type=Path, help="model folder; default: SmolLM2-135M-Instruct")
    up.add_argument(
        "--redis",
        metavar="URL",
        help="your own Redis (or PREFIXFLEET_REDIS_URL); default: an embedded one",
    )
    up.add_argument("--port", type=_port, default=8000, help="of the router; 0: any free one")
    up.add_argument("--detach", action="store_true", help="leave it running")
    up.set_defaults(run=commands.up)
    status = verbs.add_parser("status", help="show nodes, tiers, links, workers, hit rate")
    status.add_argument("--json", action="store_true", help="one JSON object")
    status.set_defaults(run=commands.status)
    down = verbs.add_parser("down", help="stop what `up` started")
    down.set_defaults(run=commands.down)
    demo = verbs.add_parser("demo", help="start two nodes, show what sharing gains, stop")
    demo.add_argument("--model", type=Path, help="model folder; default: SmolLM2-135M-Instruct")
    demo.add_argument("--json", action="store_true", help="only the last line, a JSON object")
    demo.set_defaults(run=commands.demo)
    for name, (_, text) in PASSED_ON.items():
        verbs.add_parser(name, help=text, add_help=False)
    return top


def main(argv: Sequence[str] | None = None) -> None:
    """Run a subcommand; exits with its status, 2 for what the user can mend."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    if arguments and arguments[0] in PASSED_ON:
        sys.exit(commands.pass_on(PASSED_ON[arguments[0]][0], arguments[1:]))
    options = parser().parse_args(arguments)
    try:
        sys.exit(options.run(options))
    except FleetError as error:
        commands.console.print(f"prefixfleet {options.verb}: {error}", style="red", markup=False)
        sys.exit(2)
    except KeyboardInterrupt:
        sys.exit(130)


def _count(text: str) -> int:
    number = int(text)
    if not 1 <= number <= 64:
        raise argparse.ArgumentTypeError(f"got {text}, expected 1 to 64")
    return number


def _port(text: str) -> int:
    number = int(text)
    if not 0 <= number <= 65_535:
        raise argparse.ArgumentTypeError(f"got {text}, expected 0 to 65535")
    return number


if __name__ == "__main__":
    main()
