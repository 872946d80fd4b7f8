"""A plan in words, in tables, and as a page. Pure but for what it prints and writes."""

import json
from collections.abc import Mapping
from typing import Any

from rich.console import Console
from rich.table import Table

from prefixfleet.router.percentiles import REACHED
from prefixfleet.router.plan_simulated import WITH_SSD
from prefixfleet.router.replay_report import packaged

Plan = Mapping[str, Any]


def words(plan: Plan) -> list[str]:
    """The answer in sentences, the most useful first."""
    without, shared = plan["simulated"]["without"], plan["simulated"]["shared"]
    own, enough, most = plan["simulated"]["own cache only"], plan["enough"], plan["memory"][-1]
    said = []
    if enough["gb"]:
        at = next(m for m in plan["memory"] if m["gb"] == enough["gb"])
        rate = at["hit_rate"]
        said.append(
            f"The cache is worth it for this trace: {enough['gb']:,.0f} GB over the fleet find "
            f"{rate['mean']:.0%} of the prompts' tokens ({rate['low']:.0%} to {rate['high']:.0%} "
            f"with 90 % confidence) and save {at['saved_nodes']:.2f} nodes' work of prefill."
        )
    else:
        said.append("The cache is not worth it for this trace: no memory pays for itself.")
    if enough["more_pays"]:
        said.append(
            f"More than the {enough['given_gb']:,.0f} GB that you gave would pay too; the settings "
            "stay within them."
        )
    said.append(
        f"More than {most['hit_rate']['mean']:.0%} cannot be found with any memory; half of the "
        f"requests then find at least {most['hit_rate']['p50']:.0%}, nine tenths at least "
        f"{most['hit_rate']['p90']:.0%}, 99 of 100 at least {most['hit_rate']['p99']:.0%}."
    )
    said.append(
        f"First token, P50 / P99 in simulation: {_ttft(without)} s without a cache, {_ttft(own)} s "
        f"with each node's own, {_ttft(shared)} s with one for all."
    )
    if WITH_SSD in plan["simulated"]:
        said.append(f"With the SSD behind it: {_ttft(plan['simulated'][WITH_SSD])} s.")
    said.append(_pulling(plan["pulling"]))
    if "saved_a_month" in enough:
        said.append(
            f"The memory costs {enough['cost_a_month']:,.0f} a month and saves "
            f"{enough['saved_a_month']:,.0f}."
        )
    elif enough["gb"]:
        step = next(s for s in enough["steps"] if s["gb"] == enough["gb"])
        said.append(
            "Its last part pays while a GB a month costs less than "
            f"{step['break_even_gb_per_node']:.2e} of what a node costs a month."
        )
    return said


def show(plan: Plan, console: Console) -> None:
    """Words, then tables."""
    for sentence in words(plan):
        console.print(sentence, highlight=False)
    console.print()
    console.print(_memory(plan))
    console.print(_tiers(plan))
    console.print(_simulated(plan))
    model = plan["model"]
    console.print(
        f"KV: {model['kv_bytes_per_token']:,} bytes a token ({model['attention']}); hardware: "
        f"{plan['hardware']['source']}",
        highlight=False,
    )
    for name, value in plan["settings"].items():
        console.print(f"{name}={value}", highlight=False)
    if "PREFIXFLEET_NODE_SSD_PATH" in plan["settings"]:
        console.print("FOLDER: one on each node's SSD", highlight=False)


def render_plan(plan: Plan) -> str:
    """One self-contained page; ``<`` is escaped so that no text can end the script element."""
    figures = json.dumps({"words": words(plan), **plan}).replace("<", "\\u003c")
    page = packaged("plan_report.html")
    page = page.replace("/*UPLOT_CSS*/", packaged("uplot.min.css"))
    page = page.replace("/*UPLOT_JS*/", packaged("uplot.min.js"))
    return page.replace("/*PLAN*/", figures)


def _pulling(worth: Mapping[str, float]) -> str:
    more = worth["adds_goodput_per_s"]
    return (
        f"That nodes give blocks to each other, with {worth['node_gb']:,.3g} GB of DRAM on each, "
        f"makes the time to the first token {worth['ttft_mean_over_own']:.2f} of what it is with "
        f"each node's own on average, {worth['ttft_p99_over_own']:.2f} at P99, and "
        f"{abs(more):.2f} requests a second {'more' if more >= 0 else 'fewer'} come in time."
    )


def _ttft(run: Mapping[str, Any]) -> str:
    return f"{run['ttft_s']['p50']:.2f} / {run['ttft_s']['p99']:.2f}"


def _memory(plan: Plan) -> Table:
    table = Table(
        "GB, fleet", "hit rate", "90 % interval", "P50", "P90", "P99",
        "saved nodes", "break-even, nodes a GB", "pays", title="Memory",
        caption=f"Hit rate {REACHED}",
    )  # fmt: skip
    for at, step in zip(plan["memory"], plan["enough"]["steps"], strict=True):
        rate = at["hit_rate"]
        table.add_row(
            f"{at['gb']:,.0f}", f"{rate['mean']:.3f}", f"{rate['low']:.3f} to {rate['high']:.3f}",
            *(f"{rate[p]:.3f}" for p in ("p50", "p90", "p99")), f"{at['saved_nodes']:.2f}",
            f"{step['break_even_gb_per_node']:.2e}", "yes" if step["pays"] else "no",
        )  # fmt: skip
    return table


def _tiers(plan: Plan) -> Table:
    table = Table("tier", "GB, fleet", "adds to hit rate", "adds saved nodes", title="Tiers")
    for tier in plan["tiers"]:
        adds = (f"{tier['adds_hit_rate']:.3f}", f"{tier['adds_saved_nodes']:.2f}")
        table.add_row(tier["tier"], f"{tier['fleet_gb']:,.0f}", *adds)
    return table


def _simulated(plan: Plan) -> Table:
    table = Table(
        "cache", "mean s", "P50", "P90", "P99", "goodput/s", "hit rate", "pulled", title="Simulated"
    )
    for name, run in plan["simulated"].items():
        times = [f"{run['ttft_s'][p]:.3f}" for p in ("mean", "p50", "p90", "p99")]
        shares = [f"{run[k]:.3f}" for k in ("goodput_per_s", "hit_rate", "pulled_share")]
        table.add_row(name, *times, *shares)
    return table
