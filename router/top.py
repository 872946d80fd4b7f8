"""``prefixfleet top``: the dashboard in a terminal, from the same snapshot of one router."""

import argparse
import asyncio
import contextlib
import sys
import time
from collections.abc import Mapping, Sequence
from typing import Any

import aiohttp
from rich.columns import Columns
from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from prefixfleet.router.arguments import positive
from prefixfleet.router.percentiles import REACHED
from prefixfleet.router.snapshot_shape import checked
from prefixfleet.store.errors import ConfigError

ASK_S = 10.0
SHOWN_DECISIONS = 12
SHOWN_LINKS = 8
BAR = 20
HIT_MARKS = " ▁▂▃▄▅▆▇█"

Snapshot = Mapping[str, Any]


def screen(snap: Snapshot, lost: str = "") -> Group:
    """One snapshot as lines and tables; ``lost`` says since when and why nothing new came."""
    parts: list[Any] = [_headline(snap)]
    if lost:
        parts.append(Text(lost, style="bold red"))
    modes = [f"{mode['reason']}; {mode['remedy']}" for mode in snap["degraded"]]
    modes += [
        f"{n['node']}: {why}" for n in snap["nodes"] for why in n["stats"].get("degraded", [])
    ]
    parts += [Text(f"degraded: {mode}", style="yellow") for mode in modes]
    parts += [_nodes(snap), _figures(snap), Columns([_prefixes(snap), _links(snap)])]
    parts.append(_decisions(snap))
    return Group(*parts)


def _headline(snap: Snapshot) -> Text:
    ready = sum(worker["state"] == "ready" for worker in snap["workers"])
    return Text(
        f"{len(snap['nodes'])} nodes, {ready} of {len(snap['workers'])} workers ready; "
        f"{snap['requests']} requests, {snap['requests_in_flight']} in flight, "
        f"{snap['waiting']} waiting; {snap['view']['blocks']} blocks known",
        style="bold",
    )


def _nodes(snap: Snapshot) -> Columns:
    shown = []
    for node in snap["nodes"]:
        for name, tier in (node["stats"].get("tiers") or {"-": {}}).items():
            full = tier.get("resident", 0) / tier["slots"] if tier.get("slots") else 0.0
            text = Text(f"{node['node']} {name} ")
            text.append("█" * round(full * BAR) + "░" * (BAR - round(full * BAR)), style="blue")
            text.append(f" {full:4.0%}" + ("" if node["lease"] == "held" else f" {node['lease']}"))
            shown.append(text)
    return Columns(shown, padding=(0, 3))


def _figures(snap: Snapshot) -> Table:
    tokens, rate, ttft = snap["tokens"], snap["hit_rate"], snap["ttft_s"]
    bins = snap["hit_histogram"]
    most = max(bins) or 1
    marks = "".join(HIT_MARKS[-(-8 * count // most)] for count in bins)
    table = Table("", "mean", "P50", "P90", "P99", "", box=None)
    table.add_row("hit rate", *_spread(rate, "{:.0%}"), f"0 {marks} 1; {REACHED}")
    table.add_row("first token, s", *_spread(ttft["observed"], "{:.3f}"), "observed, streams")
    table.add_row("without the cache, s", *_spread(ttft["without_cache"], "{:.3f}"), "estimated")
    table.add_row("estimate, s", *_spread(ttft["estimated"], "{:.3f}"), "of the first row of times")
    origin = ", ".join(f"{count} {name}" for name, count in tokens.items())
    table.add_row("tokens", "", "", "", "", origin)
    return table


def _spread(values: Mapping[str, float], form: str) -> list[str]:
    return [form.format(values[name]) for name in ("mean", "p50", "p90", "p99")]


def _prefixes(snap: Snapshot) -> Table:
    table = Table("hottest prefixes", "tokens", "requests", box=None)

    def add(entry: Mapping[str, Any], depth: int) -> None:
        name = "  " * depth + entry["prefix"]
        table.add_row(name, str(entry["tokens"]), str(entry["requests"]))
        for child in entry["children"]:
            add(child, depth + 1)

    for entry in snap["prefixes"][:5]:
        add(entry, 0)
    return table


def _links(snap: Snapshot) -> Table:
    table = Table("link", "", "MB/s", "set-up ms", "pulls", box=None)
    for link in snap["links"][:SHOWN_LINKS]:
        speed, setup = link["bytes_per_s"] / 1e6, link["setup_s"] * 1e3
        way = f"{link['from']} → {link['to']}"
        table.add_row(way, link["link"], f"{speed:.0f}", f"{setup:.1f}", str(link["pulls"]))
    return table


def _decisions(snap: Snapshot) -> Table:
    table = Table("time", "node", "tokens", "local", "pulled", "estimate", "first token", "why")
    for seen in reversed(snap["decisions"][-SHOWN_DECISIONS:]):
        first = "-" if seen["ttft_s"] is None else f"{seen['ttft_s']:.3f}"
        counts = [str(seen[name]) for name in ("tokens", "local", "pulled")]
        at = time.strftime("%H:%M:%S", time.localtime(seen["at"]))
        table.add_row(at, seen["node"], *counts, f"{seen['estimate_s']:.3f}", first, seen["reason"])
    return table


async def read_snapshot(session: aiohttp.ClientSession, base: str) -> Snapshot:
    """The router's snapshot. Raises `ConfigError` if there is none to be had."""
    try:
        async with session.get(base.rstrip("/") + "/dashboard/snapshot") as answer:
            if answer.status == 401:
                raise ConfigError(f"{base}: the router wants an --api-key that may watch the fleet")
            if answer.status != 200:
                raise ConfigError(f"{base}: got HTTP {answer.status}, expected a router's snapshot")
            return checked(await answer.json(), base)
    except (aiohttp.ClientError, TimeoutError, ValueError) as error:
        raise ConfigError(
            f"{base} does not answer ({type(error).__name__}); does the router run? "
            "--endpoint names another one"
        ) from error


async def watch(options: argparse.Namespace, console: Console) -> None:
    """Show until interrupted; a router that goes away may come back. Raises `ConfigError` only
    while there was nothing to show."""
    headers = {"Authorization": f"Bearer {options.api_key}"} if options.api_key else {}
    limit = aiohttp.ClientTimeout(total=ASK_S)
    async with aiohttp.ClientSession(headers=headers, timeout=limit) as session:
        snap = await read_snapshot(session, options.endpoint)
        if options.once:
            console.print(screen(snap))
            return
        with Live(screen(snap), console=console, screen=True, auto_refresh=False) as live:
            while True:
                await asyncio.sleep(options.interval)
                try:
                    snap, lost = await read_snapshot(session, options.endpoint), ""
                except ConfigError as error:
                    lost = str(error)
                live.update(screen(snap, lost), refresh=True)


def parser() -> argparse.ArgumentParser:
    """Command line."""
    p = argparse.ArgumentParser(prog="prefixfleet top", description=__doc__)
    p.add_argument("--endpoint", default="http://127.0.0.1:8000", help="base URL of the router")
    p.add_argument(
        "--api-key", default="", help="one that may watch the fleet, where there are any"
    )
    p.add_argument("--interval", type=positive, default=2.0, help="seconds")
    p.add_argument("--once", action="store_true", help="print one screen and end")
    return p


def main(argv: Sequence[str] | None = None) -> int:
    """0 when interrupted or done; 2 for a router that does not answer."""
    options = parser().parse_args(argv)
    try:
        with contextlib.suppress(KeyboardInterrupt):
            asyncio.run(watch(options, Console()))
    except ConfigError as error:
        Console(stderr=True).print(f"prefixfleet top: {error}", style="red", markup=False)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
