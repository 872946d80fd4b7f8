"""What is recorded of each request: metrics, the decision's headers, and one line that says why."""

import logging
import time

from msgspec import Struct

from prefixfleet.router.adapter_notices import drift
from prefixfleet.router.body import Body
from prefixfleet.router.charge import Charge
from prefixfleet.router.client import Client
from prefixfleet.router.core import Router
from prefixfleet.router.dispatch import Dispatched
from prefixfleet.router.estimate import PrefillModel
from prefixfleet.router.headers import OURS, REQUEST_ID, KeepWish
from prefixfleet.router.json_log import DecisionRecord
from prefixfleet.router.keys import Key
from prefixfleet.router.outcome import read_outcome
from prefixfleet.router.prompt import Prompt
from prefixfleet.router.routes import Route
from prefixfleet.router.tracing import RequestSpan

log = logging.getLogger("prefixfleet.router.decisions")


WHY = (
    "request %(request)s, x-request-id %(called)s: %(tokens)d tokens to %(worker)s on %(node)s, "
    "by policy %(policy)s: %(hit_blocks)d blocks there, %(pull_blocks)d pulled from %(source)s; "
    "queue %(queue_s).3f s, load %(load_s).3f s, pull %(pull_s).3f s, prefill %(prefill_s).3f s"
)
WHY_BOUND = WHY + "; no choice: it keeps the response that %(bound)s names"
ORIGINS = ("engine", "local", "pulled", "computed")
MAX_KEPT_BYTES = 64 * 1024  # of an answer that waits to be read for what its engine says
MIN_EVENTS = 8  # of a stream, to learn from: shorter ones measure the network


class Passage(Struct, frozen=True, kw_only=True):
    """One request on its way through the router."""

    router: Router
    client: Client
    route: Route
    key: Key
    body: Body
    prompt: Prompt
    received_s: float
    deadline_s: float  # the client's own limit on the time to first token; 0: none
    keep: KeepWish  # of its prefix
    id: str
    span: RequestSpan
    bound: str = ""  # the field for which only one worker was possible

    def headers(self, dispatched: Dispatched) -> dict[str, str]:
        """The decision, for the client. Tokens are what was expected when it was taken."""
        decision, block_tokens = dispatched.decision, dispatched.worker.block_tokens
        told = {
            REQUEST_ID: self.client.called,
            OURS + "request": self.id,
            OURS + "node": dispatched.worker.record.node,
            OURS + "hit-tokens": str(decision.hit_blocks * block_tokens),
            OURS + "pulled-tokens": str(decision.pull_blocks * block_tokens),
            OURS + "estimate-ms": str(round(1_000 * decision.total_s)),
        }
        if self.bound:
            told[OURS + "bound"] = self.bound
        return told

    def note_prompt(self) -> None:
        """Count a prompt whose prefix is not known."""
        if self.prompt.blind:
            self.router.metrics.blind.labels(self.route.name).inc()
            reason = ascii(
                self.prompt.blind
            )  # it may quote the client, who may not write lines here
            log.info("request %s: no prefix: %.200s", self.id, reason)

    def say_why(self, dispatched: Dispatched) -> None:
        """The line that says why this worker."""
        if self.router.tracing.on:
            self.span.decided(self.terms(dispatched))
        model, now = self.router.dispatcher.speeds.of(dispatched.worker.record), time.time()
        self.router.afterwards.note(lambda: self._note_sent(dispatched, model, now))

    def _note_sent(self, dispatched: Dispatched, model: PrefillModel, at: float) -> None:
        metrics = self.router.metrics
        pulls = "yes" if dispatched.decision.source else "no"
        metrics.labelled(metrics.decisions, dispatched.worker.name, pulls).inc()
        cold_s = model.seconds(self.prompt.tokens, 0)
        self.router.activity.sent(self.id, self.route.name, self.prompt.tokens, dispatched, cold_s)
        if log.isEnabledFor(logging.INFO):
            form = WHY_BOUND if self.bound else WHY
            log.handle(DecisionRecord(log.name, form, self.terms(dispatched), at))

    def terms(self, dispatched: Dispatched) -> dict[str, str | int | float]:
        """What the decision rests on, by name."""
        decision = dispatched.decision
        told: dict[str, str | int | float] = {
            "request": self.id,
            "called": self.client.called,
            "route": self.route.name,
            "tokens": self.prompt.tokens,
            "policy": self.router.settings.policy,
            "worker": dispatched.worker.name,
            "node": dispatched.worker.record.node,
            "hit_blocks": decision.hit_blocks,
            "pull_blocks": decision.pull_blocks,
            "source": decision.source.node if decision.source else "nobody",
            "queue_s": round(decision.queue_s, 6),
            "load_s": round(decision.load_s, 6),
            "pull_s": round(decision.pull_s, 6),
            "prefill_s": round(decision.prefill_s, 6),
        }
        if self.bound:
            told["bound"] = self.bound
        return told

    def note_first_byte(self, dispatched: Dispatched, charge: Charge) -> None:
        """Compare the estimate with what happened, and learn from it."""
        now_s = self.router.clock()
        observed_s = now_s - charge.started_s if self.is_streamed else None
        if observed_s is not None:
            self.router.dispatcher.learn(dispatched, self.prompt, charge)
        estimated_s, ttft_s = dispatched.decision.total_s, now_s - self.received_s
        self.router.afterwards.note(lambda: self._note_times(ttft_s, estimated_s, observed_s))

    def _note_times(self, ttft_s: float, estimated_s: float, observed_s: float | None) -> None:
        metrics = self.router.metrics
        metrics.labelled(metrics.ttft_s, self.route.name).observe(ttft_s)
        if observed_s is not None:
            self.router.activity.first_byte(self.id, observed_s)
            metrics.estimate_error_s.observe(abs(estimated_s - observed_s))

    def note_pace(self, dispatched: Dispatched, charge: Charge, events: int) -> None:
        """Learn from a stream how fast its tokens came: an event is one token of one sequence."""
        if charge.first_byte_s is None or events < MIN_EVENTS:
            return
        seconds = (self.router.clock() - charge.first_byte_s) * self.prompt.outputs / events
        worker = dispatched.worker.name
        sequences = self.router.book.load(worker).decoding
        self.router.token_times.observe(worker, max(1, sequences), seconds)

    def note_reuse(self, dispatched: Dispatched, whole: bytes) -> None:
        """Count where the prompt's tokens came from: as the engine says, else as planned."""
        if self.prompt.blind or not self.prompt.tokens:
            return
        if len(whole) > MAX_KEPT_BYTES:
            self._note_reuse(dispatched, whole)
        else:
            self.router.afterwards.note(lambda: self._note_reuse(dispatched, whole))

    def _note_reuse(self, dispatched: Dispatched, whole: bytes) -> None:
        block_tokens = dispatched.worker.block_tokens
        outcome = read_outcome(whole) if whole else None
        if outcome:
            self._compare_head(dispatched, outcome.head)
            basis = "reported"
            blocks = (outcome.engine_blocks, outcome.local_blocks, outcome.pulled_blocks)
        else:
            basis = "planned"
            decision = dispatched.decision
            blocks = (0, decision.hit_blocks, decision.pull_blocks)
        reused = sum(blocks) * block_tokens
        computed = max(0, self.prompt.tokens - reused)
        metrics = self.router.metrics
        counts = [*[count * block_tokens for count in blocks], computed]
        for source, count in zip(ORIGINS, counts, strict=True):
            if count:
                metrics.labelled(metrics.prompt_tokens, source, basis).inc(count)
        self.router.activity.ended(
            self.id, (blocks[0] + blocks[1]) * block_tokens, blocks[2] * block_tokens, computed
        )
        ratio = min(1.0, reused / self.prompt.tokens)
        metrics.labelled(metrics.hit_ratio, self.route.name, self.key.tier).observe(ratio)
        self.router.hit_ratios.append(ratio)

    def _compare_head(self, dispatched: Dispatched, head: str) -> None:
        """The engine's hash of the first block, beside ours: parity, checked on live traffic."""
        if head and dispatched.chain and head != dispatched.chain[0].hex():
            self.router.metrics.drift.labels(self.route.name).inc()
            worker, adapter = dispatched.worker.name, dispatched.worker.adapter
            if adapter:
                self.router.degraded.enter(
                    drift(adapter),
                    f"worker {worker} has other files of it than it says: they match nothing",
                    "load changed files from a new folder, or start the engine again",
                )
                return
            self.router.degraded.enter(
                f"drift of {self.route.name}",
                f"worker {worker} hashes prompts of this route otherwise than this router: they "
                "match nothing",
                "report the request's form; other routes are not affected",
            )

    @property
    def goes_on(self) -> bool:
        """Whether the engine computes it behind its answer, and though the client leaves."""
        return self.route.stores and self.body.get("background", bool) is True

    @property
    def is_streamed(self) -> bool:
        """Whether the client asked for a stream: only then the first byte is a first token."""
        return self.body.get("stream", bool) is True
