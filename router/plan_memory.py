"""How much of the memory that was given is worth having, and the settings that take it. Pure."""

import argparse
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from prefixfleet.router.fleet_models import GB
from prefixfleet.store.errors import ConfigError

HOURS_A_MONTH = 730.0
WORTH_IT = 0.02
"""Without prices, memory is enough where doubling it saves less than this part of the prefill."""
LEAST_BYTES = 1 << 20
"""That a node takes as the size of a tier."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Given:
    """What the user has: GB of each tier on each of ``nodes``; nothing beyond is recommended."""

    nodes: int
    dram_gb: float
    ssd_gb: float
    block_bytes: int

    @classmethod
    def of(cls, options: argparse.Namespace, block_bytes: int) -> "Given":
        """From the command line. Raises `ConfigError` for memory that holds no block."""
        if options.dram_gb * GB < block_bytes:
            raise ConfigError(
                f"--dram-gb {options.dram_gb:g}: expected room for a block, which is "
                f"{block_bytes / GB:.3g} GB with this trace and model"
            )
        return cls(
            nodes=options.nodes, dram_gb=options.dram_gb, ssd_gb=options.ssd_gb or 0.0,
            block_bytes=block_bytes,
        )  # fmt: skip

    @property
    def dram_fleet_gb(self) -> float:
        """Of all nodes."""
        return self.dram_gb * self.nodes

    @property
    def fleet_gb(self) -> float:
        """Of all nodes and tiers."""
        return (self.dram_gb + self.ssd_gb) * self.nodes

    @property
    def blocks(self) -> list[int]:
        """That the fleet's DRAM holds, and all its tiers."""
        return [int(gb * GB / self.block_bytes) for gb in (self.dram_fleet_gb, self.fleet_gb)]

    def needs_ssd(self, fleet_gb: float) -> bool:
        """Whether so much is more than the DRAM, by half a block at least."""
        return fleet_gb > self.dram_fleet_gb + self.block_bytes / GB / 2

    def dram_blocks_of_node(self, fleet_gb: float) -> int:
        """Of a node's DRAM where the fleet takes so much; all of it where it takes nothing."""
        gb = min(fleet_gb / self.nodes or self.dram_gb, self.dram_gb)
        return max(1, int(gb * GB / self.block_bytes))


def enough_memory(
    curve: Sequence[dict[str, Any]], given: Given, options: argparse.Namespace
) -> dict[str, Any]:
    """The largest memory within what was given whose last part still pays, and the price at which
    it would not.

    A price is what a GB-month may cost as a part of what a node-month costs. ``more_pays`` says
    that memory beyond what was given would pay too.
    """
    steps = []
    before = {"gb": 0.0, "saved_nodes": 0.0, "saved_share": 0.0}
    for at in curve:
        steps.append(_step(before, at, _price(before["gb"], given, options), options.node_hour))
        before = at
    paying = [step for step in steps if step["pays"]]
    within = [step for step in paying if step["blocks"] <= given.blocks[-1]]
    gb = within[-1]["gb"] if within else 0.0
    result: dict[str, Any] = {
        "steps": steps, "gb": gb, "given_gb": given.fleet_gb,
        "more_pays": bool(paying) and paying[-1]["blocks"] > given.blocks[-1],
    }  # fmt: skip
    if gb and options.gb_month is not None:
        saved = next(at["saved_nodes"] for at in curve if at["gb"] == gb)
        dram_gb = min(gb, given.dram_fleet_gb)
        ssd_price = options.ssd_gb_month or options.gb_month
        result["cost_a_month"] = dram_gb * options.gb_month + (gb - dram_gb) * ssd_price
        result["saved_a_month"] = saved * options.node_hour * HOURS_A_MONTH
    return result


def _price(above_gb: float, given: Given, options: argparse.Namespace) -> float | None:
    """Of a GB-month ``above_gb``: a part of the SSD's price where the DRAM ends below."""
    on_disk = given.ssd_gb and given.needs_ssd(above_gb + given.block_bytes / GB)
    price: float | None = (options.ssd_gb_month if on_disk else None) or options.gb_month
    return price


def _step(
    before: dict[str, Any], at: dict[str, Any], gb_month: float | None, node_hour: float
) -> dict[str, Any]:
    """From one size to the next: the price up to which that pays, and whether it does."""
    worth = (at["saved_nodes"] - before["saved_nodes"]) / (at["gb"] - before["gb"])
    doublings = math.log2(at["gb"] / before["gb"]) if before["gb"] else 1.0
    pays = at["saved_share"] - before["saved_share"] >= WORTH_IT * doublings
    if gb_month is not None:
        pays = worth * node_hour * HOURS_A_MONTH > gb_month
    return {"gb": at["gb"], "blocks": at["blocks"], "break_even_gb_per_node": worth, "pays": pays}


def settings_for(gb: float, given: Given, ttft_slo_s: float) -> dict[str, str]:
    """What to set on each node and router to take ``gb`` over the fleet; nothing for nothing."""
    if not gb:
        return {}
    node_bytes, dram_bytes = int(gb * GB / given.nodes), int(given.dram_gb * GB)
    settings = {"PREFIXFLEET_NODE_POOL_BYTES": str(max(LEAST_BYTES, min(node_bytes, dram_bytes)))}
    if given.needs_ssd(gb):
        settings["PREFIXFLEET_NODE_SSD_PATH"] = "FOLDER"
        settings["PREFIXFLEET_NODE_SSD_BYTES"] = str(max(LEAST_BYTES, node_bytes - dram_bytes))
    return settings | {"PREFIXFLEET_ROUTER_TTFT_SLO_S": f"{ttft_slo_s:g}"}
