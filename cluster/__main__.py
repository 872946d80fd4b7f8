"""The command line: ``prefixfleet``. Imports no engine, Ray or torch before they are needed."""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import get_args

from prefixfleet.cluster import commands, operate
from prefixfleet.cluster.settings import EncodingName
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
    up.add_argument("--nodes", type=_count, default=2, help="node daemons")
    up.add_argument(
        "--model",
        type=Path,
        action="append",
        default=[],
        metavar="DIR",
        help="model folder; several: the nodes serve them in turn; default: SmolLM2-135M-Instruct",
    )
    up.add_argument(
        "--redis",
        metavar="URL",
        help="your own Redis (or PREFIXFLEET_REDIS_URL); default: an embedded one",
    )
    up.add_argument("--port", type=_port, default=8000, help="of the router; 0: any free one")
    up.add_argument(
        "--encoding",
        choices=get_args(EncodingName),
        help="how blocks are stored (or PREFIXFLEET_WORKER_ENCODING); default: exact",
    )
    up.add_argument(
        "--colocate",
        action="store_true",
        help="an engine of each model on every node, all on its one memory",
    )
    up.add_argument("--detach", action="store_true", help="leave it running")
    up.set_defaults(run=commands.up)
    status = verbs.add_parser("status", help="show nodes, tiers, links, workers, hit rate")
    status.add_argument("--json", action="store_true", help="one JSON object")
    status.add_argument("--endpoint", default="", metavar="URL", help="of another fleet's router")
    status.set_defaults(run=commands.status)
    down = verbs.add_parser("down", help="stop what `up` started")
    down.set_defaults(run=commands.down)
    demo = verbs.add_parser("demo", help="start two nodes, show what sharing gains, stop")
    demo.add_argument("--model", type=_folders, default=[], help="instead of SmolLM2-135M-Instruct")
    demo.add_argument("--json", action="store_true", help="only the last line, a JSON object")
    demo.set_defaults(run=commands.demo)
    _add_operations(verbs)
    for name, (_, text) in PASSED_ON.items():
        verbs.add_parser(name, help=text, add_help=False)
    return top


def _add_operations(verbs: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """What is asked of a fleet that runs: this machine's own, or the one at ``--redis``."""
    drain = verbs.add_parser("drain", help="send no new requests to workers")
    resume = verbs.add_parser("resume", help="send requests to it again")
    for verb, run in ((drain, operate.drain), (resume, operate.resume)):
        verb.add_argument(
            "names", nargs="+", metavar="NAME", help="of a worker or a node, or a host's address"
        )
        verb.set_defaults(run=run)
    scale = verbs.add_parser("scale", help="let more or fewer nodes run engines")
    scale.add_argument("nodes", type=_count, nargs="?")
    scale.add_argument(
        "--between",
        type=_count,
        nargs=2,
        metavar=("LEAST", "MOST"),
        help="leave it to the fleet: as many as keep the wait at --target",
    )
    scale.add_argument(
        "--target", type=_seconds, default=1.0, metavar="S", help="wait for an engine; default: 1"
    )
    scale.set_defaults(run=operate.scale)
    update = verbs.add_parser("update", help="exchange the engines one by one, with other settings")
    update.add_argument("--model", type=Path, metavar="DIR", help="another model, same name")
    update.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="PREFIXFLEET_WORKER_NAME=VALUE",
        help="a setting of the engines; may be given again",
    )
    update.add_argument("--downtime", action="store_true", help="also if nobody else serves it")
    update.set_defaults(run=operate.update)
    for verb in (drain, scale, update):
        verb.add_argument(
            "--wait", type=float, default=0.0, metavar="S", help="until done, so long at most"
        )
    for verb in (drain, resume, scale, update):
        verb.add_argument("--redis", metavar="URL", help="of the fleet (or PREFIXFLEET_REDIS_URL)")


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


def _folders(text: str) -> list[Path]:
    return [Path(text)]


def _seconds(text: str) -> float:
    number = float(text)
    if not 0.01 <= number <= 3600:
        raise argparse.ArgumentTypeError(f"got {text}, expected 0.01 to 3600")
    return number


def _port(text: str) -> int:
    number = int(text)
    if not 0 <= number <= 65_535:
        raise argparse.ArgumentTypeError(f"got {text}, expected 0 to 65535")
    return number


if __name__ == "__main__":
    main()
