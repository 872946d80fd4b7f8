"""Every Prometheus metric of the router, with its unit and labels. Labels have few values:
routes and states are ours, worker and node names come from the fleet, never from a client.
"""

from collections import Counter as CountOf
from functools import cache
from typing import TYPE_CHECKING, TypeVar

from prometheus_client import CollectorRegistry, Counter, Gauge, generate_latest

from prefixfleet.router.roster import STATES
from prefixfleet.router.tallies import Count, Spread

if TYPE_CHECKING:
    from prefixfleet.router.core import Router

_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60)
_DECISION_SECONDS = (0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.1)
_RATIOS = (0.0, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.95, 1.0)


Labelled = TypeVar("Labelled", Count, Spread)


def _labelled(metric: Labelled, *values: str) -> Labelled:
    return metric.labels(*values)


class Metrics:
    """Owned by one router; its own registry, so that several live in one process of a test.

    ``labelled(metric, *values)`` is ``metric.labels(*values)``, looked up faster. What every
    request is counted in is a `Count` or a `Spread`.
    """

    def __init__(self) -> None:
        self.registry = r = CollectorRegistry()
        self.labelled = cache(_labelled)
        self.requests = Count(
            "prefixfleet_requests", "Requests answered", ["route", "status"], registry=r
        )
        self.in_flight = Gauge(
            "prefixfleet_requests_in_flight", "Requests being served", registry=r
        )
        self.ttft_s = Spread(
            "prefixfleet_ttft_seconds",
            "Request received to first byte of the answer",
            ["route"],
            buckets=_SECONDS,
            registry=r,
        )
        self.tokenise_s = Spread(
            "prefixfleet_tokenise_seconds",
            "Rendering, tokenising and hashing a prompt",
            buckets=_DECISION_SECONDS,
            registry=r,
        )
        self.decision_s = Spread(
            "prefixfleet_decision_seconds",
            "Looking up the prefix and choosing a worker",
            buckets=_DECISION_SECONDS,
            registry=r,
        )
        self.estimate_error_s = Spread(
            "prefixfleet_estimate_error_seconds",
            "Absolute difference of estimated and observed time to first byte",
            buckets=_SECONDS,
            registry=r,
        )
        self.hit_ratio = Spread(
            "prefixfleet_hit_ratio",
            "Part of a prompt's tokens that was not computed",
            ["route", "tier"],
            buckets=_RATIOS,
            registry=r,
        )
        self.prompt_tokens = Count(
            "prefixfleet_prompt_tokens",
            "Prompt tokens by where they came from; streams are counted as planned",
            ["source", "basis"],
            registry=r,
        )
        self.drift = Counter(
            "prefixfleet_parity_drift",
            "Answers whose engine hashed the prompt otherwise than the router",
            ["route"],
            registry=r,
        )
        self.blind = Counter(
            "prefixfleet_blind_prompts", "Prompts routed by load alone", ["route"], registry=r
        )
        self.stored_responses = Counter(
            "prefixfleet_stored_responses",
            "Requests that only the worker which keeps a response can answer: of going on from it, "
            "reading or cancelling it, by what came of looking for that worker; and responses in "
            "the background that count as done because it did not say (follow, untold)",
            ["asked", "result"],
            registry=r,
        )
        self.unread_response_ids = Counter(
            "prefixfleet_unread_response_ids",
            "Answers to responses whose id could not be read: nobody finds them again",
            registry=r,
        )
        self.background = Gauge(
            "prefixfleet_background_responses",
            "Responses that engines compute behind their answer, counted as load",
            registry=r,
        )
        self.decisions = Count(
            "prefixfleet_decisions", "Requests sent", ["worker", "pull"], registry=r
        )
        self.retries = Counter(
            "prefixfleet_retries", "Requests sent to another worker", ["reason"], registry=r
        )
        self.waits_for_worker = Counter(
            "prefixfleet_waits_for_worker",
            "Requests that found no worker ready and waited for one",
            registry=r,
        )
        self.broken_streams = Counter(
            "prefixfleet_broken_streams", "Answers that a worker broke off", registry=r
        )
        self.cut_clients = Counter(
            "prefixfleet_cut_clients",
            "Clients cut off: unread, they took nothing of their answer",
            ["reason"],
            registry=r,
        )
        self.hints = Counter(
            "prefixfleet_prefetch_hints", "Hints sent to nodes", ["result"], registry=r
        )
        self.wishes = Counter(
            "prefixfleet_keep_wishes", "Wishes told to nodes", ["result"], registry=r
        )
        self.workers = Gauge("prefixfleet_workers", "Known workers", ["state"], registry=r)
        self.nodes = Gauge("prefixfleet_nodes", "Live nodes in the view", registry=r)
        self.view_blocks = Gauge("prefixfleet_view_blocks", "Blocks in the view", registry=r)
        self.waiting = Gauge(
            "prefixfleet_waiting_requests", "Requests that wait here for a worker", registry=r
        )
        self.waiting_tokens = Gauge(
            "prefixfleet_waiting_tokens",
            "Prompt tokens of those for which some worker is ready",
            registry=r,
        )
        self.index_lag_s = Gauge(
            "prefixfleet_index_lag_seconds", "Since the index answered last", registry=r
        )
        self.unpublished_blocks = Gauge(
            "prefixfleet_index_unpublished_blocks",
            "Blocks that nodes hold and have not told the index yet",
            registry=r,
        )
        self.view_gaps = Gauge("prefixfleet_view_gaps", "Lost event streams", registry=r)
        self.event_losses = Gauge(
            "prefixfleet_engine_event_losses",
            "What went wrong following a plain engine's KV events",
            ["worker", "kind"],
            registry=r,
        )
        self.refused_orders = Gauge(
            "prefixfleet_refused_orders",
            "Orders in Redis that nobody with the cluster secret gave",
            registry=r,
        )
        self.degraded = Gauge("prefixfleet_degraded", "Degraded modes", ["mode"], registry=r)

    def read_gauges(self, router: "Router") -> None:
        """Set what is read rather than counted, after what is still to be counted."""
        router.afterwards.catch_up()
        self.in_flight.set(router.in_flight)
        waiting = router.turns.load()
        self.waiting.set(waiting.queued_requests + router.without_worker)
        self.waiting_tokens.set(waiting.queued_tokens)
        self.background.set(len(router.background))
        self.index_lag_s.set(router.feed.lag_s)
        self.unpublished_blocks.set(router.feed.unpublished_blocks)
        self.nodes.set(len(router.view.members))
        self.view_blocks.set(len(router.view))
        self.view_gaps.set(router.feed.gaps)
        states = CountOf(standing.state for standing in router.roster.standings())
        for state in STATES:
            self.workers.labels(state).set(states[state])
        self.event_losses.clear()
        for worker, losses in router.engines.losses().items():
            for kind, count in losses.items():
                self.event_losses.labels(worker, kind).set(count)
        self.refused_orders.set(len(router.orders.refused))
        self.degraded.clear()
        for mode in router.degraded.modes():
            self.degraded.labels(mode.name).set(1)

    def render(self) -> bytes:
        """Text exposition format."""
        return generate_latest(self.registry)
