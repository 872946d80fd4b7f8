"""What `prefixfleet status` prints of one router. Pure."""

from typing import Any

from msgspec import structs

from prefixfleet.router.core import Router
from prefixfleet.router.estimate import PrefillModel
from prefixfleet.router.percentiles import reach


def status_of(router: Router) -> dict[str, Any]:
    """Everything worth knowing about a router, as JSON."""
    router.afterwards.catch_up()
    now = router.clock()
    return {
        "uptime_s": round(now - router.started_s, 3),
        "policy": router.settings.policy,
        "requests_in_flight": router.in_flight,
        "nodes": _nodes(router),
        "workers": _workers(router),
        "view": {
            "blocks": len(router.view),
            "gaps": router.feed.gaps,
            "loaded": router.feed.loaded.is_set(),
            "lag_s": round(router.feed.lag_s, 3),
            "unpublished_blocks": router.feed.unpublished_blocks,
        },
        "stored_responses": {"known": len(router.keepers), "untold": router.keepers.untold},
        "waiting": structs.asdict(router.turns.load()) | {"without_worker": router.without_worker},
        "hit_rate": {"count": len(router.hit_ratios)} | reach(router.hit_ratios),
        "degraded": [
            {
                "mode": mode.name,
                "reason": mode.reason,
                "remedy": mode.remedy,
                "for_s": round(now - mode.since_s, 3),
            }
            for mode in router.degraded.modes()
        ],
    }


def _nodes(router: Router) -> list[dict[str, Any]]:
    """Also those that are awaited: an index that lost its memory is no node's end."""
    records, members = router.feed.records, router.view.members
    return [
        {
            "node": name,
            "epoch": members[name].epoch if name in members else None,
            "slot": members[name].slot if name in members else None,
            "lease": _lease(router, name),
            "host": records[name].host if name in records else "",
            "stats": records[name].stats if name in records else {},
        }
        for name in sorted(members.keys() | router.view.awaited)
    ]


def _lease(router: Router, node: str) -> str:
    """``awaited``: the index lost its memory, the node has not joined again yet; ``suspect``: it
    failed before our eyes; else ``held``."""
    if node not in router.view.members:
        return "awaited"
    return "suspect" if router.view.is_suspect(node) else "held"


def _workers(router: Router) -> list[dict[str, Any]]:
    events = router.engines.numbers()
    return [
        {
            "worker": standing.record.worker,
            "node": standing.record.node,
            "url": standing.record.url,
            "model": standing.record.model,
            "state": standing.state,
            "reason": standing.reason,
            "block_tokens": standing.record.namespace.get("block_tokens"),
            "block_bytes": standing.record.block_bytes,
            "load": structs.asdict(router.book.load(standing.record.worker)),
            "prefill": _learned(router.dispatcher.speeds.of(standing.record)),
            "adapters": {
                name: "by load" if lora is None else "by prefix"
                for name, lora in sorted(standing.adapters.items())
            },
        }
        | ({"events": events[standing.record.worker]} if standing.record.worker in events else {})
        for standing in sorted(router.roster.standings(), key=lambda s: s.record.worker)
    ]


def _learned(model: PrefillModel) -> dict[str, float]:
    """Seconds of a prefill: a step, a thousand new tokens, a million of (prompt^2 - cached^2)."""
    names = ("step_s", "s_per_thousand", "s_per_million")
    return dict(zip(names, model.coefficients, strict=True)) | {"samples": model.samples}
