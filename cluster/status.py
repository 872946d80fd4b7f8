"""``prefixfleet status``: what runs, how it stands, what is degraded. Changes nothing."""

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

import aiohttp
from rich.console import Console
from rich.table import Table

from prefixfleet.cluster.node_stats import NAME_DIGITS
from prefixfleet.cluster.router_status import checked
from prefixfleet.cluster.run_state import RunDir
from prefixfleet.store.errors import ConfigError, IndexUnavailable
from prefixfleet.store.registry import WorkerRegistry

ASK_S = 5.0
REFUSALS = ("refused", "protocol", "not_granted", "too_many", "error")
"""Of the reasons for which connections of peers end, those that no sound peer gives: another
secret or no word in time, another version or junk, a read without a lease, too many, a fault."""


async def read_status(directory: RunDir, endpoint: str = "") -> dict[str, Any]:
    """A fleet's own notes and its router's view, as JSON: of the fleet that runs here, or of any
    whose router is at ``endpoint``.

    Raises:
        ConfigError: no fleet of that name runs here, or its router does not answer.
    """
    if endpoint:
        plain = endpoint.rstrip("/").removesuffix("/v1")
        return {"fleet": "", "phase": "ready", "endpoint": plain} | await _router_status(plain)
    state = directory.read()
    if state is None or not state.supervisor_alive():
        raise ConfigError(
            f"no fleet {directory.path.name!r} runs here; start one with `prefixfleet up`, or give "
            "--endpoint for another one's router"
        )
    fleet = {"fleet": directory.path.name, "phase": state.phase, "endpoint": state.endpoint}
    if not state.endpoint:
        return {**fleet, "nodes": [], "workers": [], "degraded": [], "hit_rate": {}}
    wish = await _wish(state.redis_url, directory)
    return fleet | {"wish": wish} | await _router_status(state.endpoint)


async def _wish(redis_url: str, directory: RunDir) -> dict[str, Any]:
    """What its operator wished, or why that is ``refused``; empty where Redis does not answer."""
    if not redis_url:
        return {}
    secret = directory.secret_file.read_bytes().strip()
    registry = WorkerRegistry(redis_url, directory.path.name, secret=secret)
    try:
        return asdict(await registry.wish())
    except IndexUnavailable:
        return {}
    except ConfigError as error:
        return {"refused": str(error)}
    finally:
        await registry.close()


async def _router_status(endpoint: str) -> dict[str, Any]:
    try:
        async with (
            asyncio.timeout(ASK_S),
            aiohttp.ClientSession() as session,
            session.get(f"{endpoint}/status") as response,
        ):
            status = await response.json()
            if response.status == 200:
                return checked(status, f"{endpoint}/status")
            raise ConfigError(f"{endpoint}/status: got {status!r:.200}, expected a router's status")
    except (aiohttp.ClientError, TimeoutError, ValueError) as error:
        raise ConfigError(
            f"the router at {endpoint} does not answer ({type(error).__name__}); "
            "see router.log in the fleet's folder, or `prefixfleet down` and `up` again"
        ) from error


def show_status(status: Mapping[str, Any], console: Console) -> None:
    """The status as tables."""
    console.print(f"fleet {status['fleet']}: {status['phase']}, {status['endpoint']}/v1")
    for line in _wished(status.get("wish") or {}):
        console.print(line, markup=False)
    console.print(_nodes(status["nodes"]))
    if any(len(_kinds(node)) > 1 for node in status["nodes"]):
        console.print(_kind_table(status["nodes"]))
    if any(_links(node) for node in status["nodes"]):
        console.print(_link_table(status["nodes"]))
    console.print(_workers(status["workers"]))
    rate = status["hit_rate"]
    if rate:
        shown = ", ".join(f"{k} {rate[k]:.2f}" for k in ("mean", "p50", "p90", "p99") if k in rate)
        console.print(
            f"hit rate of {rate.get('count', 0)} requests: {shown} "
            "(P90, P99: what nine tenths, 99 of 100 reach at least)"
        )
    for node in status["nodes"]:
        if refused := _refused(node["stats"].get("sessions")):
            console.print(f"refused callers: {node['node']}: {refused}", markup=False)
    for mode in status["degraded"]:
        console.print(f"degraded: {mode['reason']}; {mode['remedy']}", style="yellow", markup=False)
    for node in status["nodes"]:
        for why in node["stats"].get("degraded", []):
            console.print(f"degraded: {node['node']}: {why}", style="yellow", markup=False)


def _wished(wish: Mapping[str, Any]) -> list[str]:
    """What the operator asked for, in a line each."""
    lines = []
    if wish.get("refused"):
        lines.append(f"the fleet's wish is not followed: {wish['refused']}")
    if wish.get("draining"):
        lines.append(f"draining: {', '.join(wish['draining'])}; `prefixfleet resume` gives back")
    if wish.get("nodes"):
        bounds = f" (between {wish['least']} and {wish['most']})" if wish["most"] else ""
        lines.append(f"scaled to {wish['nodes']} nodes{bounds}")
    if wish.get("rollout"):
        changes = ", ".join(f"{name}={value}" for name, value in wish["environ"].items())
        lines.append(f"update {wish['rollout']}: {changes}")
    if wish.get("failed"):
        lines.append(f"the last wish failed: {wish['failed']}; wish something else")
    return lines


def _nodes(nodes: Sequence[Mapping[str, Any]]) -> Table:
    table = Table(
        "node", "epoch", "lease", "tier", "blocks", "of", "pinned", "kept free", "GiB", "hit ms",
        "engines",
    )  # fmt: skip
    for node in nodes:
        stats = node["stats"]
        hit_ms = 1e3 * _number(stats.get("hits", {}), "block_s")  # a block, memory and disk
        for name, tier in (stats.get("tiers") or {"-": {}}).items():
            size = _number(tier, "resident") * _number(tier, "slot_bytes") / 2**30
            table.add_row(
                node["node"], str(node["epoch"] or "-"), node["lease"], name,
                str(tier.get("resident", 0)), str(tier.get("slots", 0)), str(tier.get("pinned", 0)),
                str(tier.get("keep_free", "")), f"{size:.2f}", f"{hit_ms:.2f}",
                str(stats.get("engines", 0)),
            )  # fmt: skip
    return table


def _kinds(node: Mapping[str, Any]) -> Mapping[str, Any]:
    """Of a node, what each namespace has, by its digest."""
    told = node["stats"].get("kinds")
    kinds = told if isinstance(told, Mapping) else {}
    return {digest: kind for digest, kind in kinds.items() if isinstance(kind, Mapping)}


def _kind_table(nodes: Sequence[Mapping[str, Any]]) -> Table:
    """Namespaces that share a node's memory."""
    table = Table(
        "node", "namespace", "engines", "slots", "GiB", "waste", "blocks found", "of", "disk GiB",
    )  # fmt: skip
    for node in nodes:
        for digest, kind in _kinds(node).items():
            size = _number(kind, "bytes")
            waste = _number(kind, "waste_bytes") / size if size else 0.0
            table.add_row(
                node["node"], digest[:NAME_DIGITS], _names(kind.get("engines")) or _away(kind),
                f"{_number(kind, 'slots'):g}", f"{size / 2**30:.2f}", f"{waste:.1%}",
                f"{_number(kind, 'found_blocks'):g}", f"{_number(kind, 'asked_blocks'):g}",
                f"{_number(kind, 'disk_bytes') / 2**30:.2f}" if kind.get("disk") else "no",
            )  # fmt: skip
    return table


def _away(kind: Mapping[str, Any]) -> str:
    return "none, ends" if kind.get("ends") else "none"


def _names(told: object) -> str:
    return ", ".join(map(str, told)) if isinstance(told, list) else ""


def _number(numbers: object, name: str) -> float:
    """What a node tells of itself; 0 for what is no number: one broken node hides no other."""
    value = numbers.get(name) if isinstance(numbers, Mapping) else None
    return value if isinstance(value, int | float) else 0.0


def _refused(sessions: object) -> str:
    """What callers of a node's links were refused, how often; "" for nothing."""
    told = sessions if isinstance(sessions, Mapping) else {}
    counts = [(link, why, _number(told[link], why)) for link in told for why in REFUSALS]
    return ", ".join(f"{link} {why} {count:g}" for link, why, count in counts if count)


def _links(node: Mapping[str, Any]) -> list[tuple[str, str, str, Mapping[str, Any]]]:
    """(source, link, why a pull would take it now or "", speed), for each link that was used."""
    found = []
    for source, measured in node["stats"].get("links", {}).items():
        for name, speed in measured.get("links", {}).items():
            why = measured.get("why", "") if name == measured.get("link") else ""
            found.append((source, name, why, speed))
    return found


def _link_table(nodes: Sequence[Mapping[str, Any]]) -> Table:
    table = Table("to", "from", "link", "taken", "lanes", "MB/s", "set-up ms", "pulls")
    for node in nodes:
        lanes = node["stats"].get("lanes", {})
        for source, name, why, speed in _links(node):
            table.add_row(
                node["node"], source, name, why, lanes.get(name, ""),
                f"{_number(speed, 'bytes_per_s') / 1e6:.0f}",
                f"{_number(speed, 'setup_s') * 1e3:.1f}",
                str(speed.get("pulls", 0)),
            )  # fmt: skip
    return table


def _workers(workers: Sequence[Mapping[str, Any]]) -> Table:
    table = Table("worker", "node", "model", "state", "waiting", "decoding", "url")
    for worker in workers:
        load = worker["load"]
        state = worker["state"] + (f": {worker['reason']}" if worker["reason"] else "")
        table.add_row(
            worker["worker"], worker["node"], worker["model"], state,
            str(load["queued_requests"]), str(load["decoding"]), worker["url"],
        )  # fmt: skip
    return table
