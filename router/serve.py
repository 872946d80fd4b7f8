"""A prompt's way through the router: read it, choose, send, watch what happens.

The rules: the load is charged before the request is sent and released however it ends; until the
client got its first byte another worker may be asked, after it never; a client that leaves
cancels the request upstream (its handler is cancelled, which closes the connection).
"""

import asyncio
from collections.abc import Sequence
from typing import Any

from aiohttp import web
from msgspec import structs, to_builtins

from prefixfleet.router.body import TRANSFER_KEY, Body, read_body, with_fields
from prefixfleet.router.core import Router
from prefixfleet.router.dispatch import Chains, Dispatched
from prefixfleet.router.errors import BadRequest, TooBusy, TooSlow, UpstreamFailed
from prefixfleet.router.headers import deadline_of, to_worker
from prefixfleet.router.inflate import inflate
from prefixfleet.router.keys import Key
from prefixfleet.router.passing import pass_on
from prefixfleet.router.prompt import Prompt
from prefixfleet.router.routes import Route
from prefixfleet.router.tracing import RequestSpan
from prefixfleet.router.upstream import WorkerLost, ask
from prefixfleet.router.watch import Passage
from prefixfleet.router.worker import Worker
from prefixfleet.store.records import PARAMS_KEY

MAX_WORKERS_TRIED = 3
BODY_S = 60.0  # 32 MB at 4 Mbit/s
INLINE_BYTES = 4_096  # a longer body is tokenised in a thread: it takes a millisecond and more


async def serve_prompt(router: Router, request: web.Request, route: Route) -> web.StreamResponse:
    """Answer one request whose prompt decides where it goes. Raises `Refusal`."""
    with router.tracing.request(route.path, request.headers) as span:
        return await _serve(router, request, route, span)


async def _serve(
    router: Router, request: web.Request, route: Route, span: RequestSpan
) -> web.StreamResponse:
    received_s = router.clock()
    _refuse_if_full(router)
    key = router.keys.check(_authorization(request))
    with router.limits.admitted(key):
        body = read_body(await _read_bytes(router, request))
        model = body.get("model", str)
        if model is None:
            raise BadRequest("the field 'model' is missing or no text", param="model")
        workers = router.traffic.allowed(router.roster.ready(model))
        prompt, chains = await _understand(router, body, route, key, workers)
        router.limits.charge_tokens(key, prompt.tokens)
        passage = Passage(
            router=router,
            request=request,
            route=route,
            key=key,
            body=body,
            prompt=prompt,
            received_s=received_s,
            deadline_s=deadline_of(request.headers),
            id=router.new_id(),
            span=span,
        )
        passage.note_prompt()
        return await _try_workers(passage, workers, chains)


def _authorization(request: web.Request) -> str | None:
    """The header in which a client names its key: OpenAI's, or Anthropic's."""
    if "X-Api-Key" in request.headers:
        return f"Bearer {request.headers['X-Api-Key']}"
    return request.headers.get("Authorization")


async def _read_bytes(router: Router, request: web.Request) -> bytes:
    """The body; one that does not arrive in time must not keep a place in flight for ever."""
    limit = router.settings.max_body_bytes
    try:
        async with asyncio.timeout(BODY_S):
            raw = await request.read()
    except TimeoutError:
        raise TooSlow(f"the body did not arrive within {BODY_S:g} s") from None
    return inflate(raw, request.headers.get("Content-Encoding", ""), limit)


def _refuse_if_full(router: Router) -> None:
    if router.in_flight > router.settings.max_in_flight:
        raise TooBusy(
            f"{router.settings.max_in_flight} requests are in flight; "
            "PREFIXFLEET_ROUTER_MAX_IN_FLIGHT is the limit",
            retry_after_s=1.0,
        )


async def _understand(
    router: Router, body: Body, route: Route, key: Key, workers: Sequence[Worker]
) -> tuple[Prompt, Chains]:
    """The prompt and its chains; off the event loop if that takes long."""

    def read() -> tuple[Prompt, Chains]:
        prompt = route.read_prompt(body, workers[0].tokens, key.tenant)
        prompt = structs.replace(prompt, salt=router.salt_of(key, prompt.salt))
        return prompt, router.dispatcher.chains(prompt, workers)

    with router.metrics.tokenise_s.time():
        if len(body.raw) <= INLINE_BYTES:
            return read()
        return await asyncio.get_running_loop().run_in_executor(router.threads, read)


async def _try_workers(
    passage: Passage, workers: Sequence[Worker], chains: Chains
) -> web.StreamResponse:
    router = passage.router
    left = list(workers)
    failures: list[str] = []
    while left and len(failures) < MAX_WORKERS_TRIED:
        dispatched = await router.turns.wait(
            passage.id,
            passage.prompt,
            chains,
            left,
            passage.received_s,
            passage.key,
            passage.deadline_s,
        )
        try:
            return await _send(passage, dispatched)
        except WorkerLost as loss:
            failures.append(str(loss))
            router.traffic.failed(dispatched.worker.name)
            left.remove(dispatched.worker)
            router.metrics.retries.labels(loss.reason).inc()
            if loss.reason != "status":
                router.roster.lost(dispatched.worker.name, str(loss))
    raise UpstreamFailed("no worker answered: " + "; ".join(failures), retry_after_s=1.0)


def _body_with_plan(passage: Passage, dispatched: Dispatched) -> bytes:
    if not passage.route.takes_plan:
        return passage.body.raw
    fields: dict[str, Any] = {}
    if not dispatched.worker.static:
        fields[TRANSFER_KEY] = {PARAMS_KEY: to_builtins(dispatched.plan)}
    elif TRANSFER_KEY in passage.body.fields:
        fields[TRANSFER_KEY] = None  # a client must not send an engine to fetch from anywhere
    if not passage.key.shared_cache:
        fields["cache_salt"] = passage.prompt.salt
    return with_fields(passage.body, fields) if fields else passage.body.raw


async def _send(passage: Passage, dispatched: Dispatched) -> web.StreamResponse:
    """The answer of the chosen worker. Raises `WorkerLost` while the client has nothing of it."""
    router, worker, request = passage.router, dispatched.worker, passage.request
    passage.say_why(dispatched)
    node = router.feed.records.get(worker.record.node)
    router.hints.send(node.http if node else "", dispatched)
    tokens = max(1, passage.prompt.tokens - dispatched.cached_tokens)
    with (
        router.turns.ending(),
        router.book.charged(
            worker.name,
            tokens=tokens,
            sequences=passage.prompt.outputs,
            expected_s=dispatched.decision.prefill_s,
        ) as charge,
    ):
        headers = to_worker(request.headers, passage.id, with_key=router.keys.path is None)
        passage.span.carry(headers)
        async with ask(
            router.pool,
            worker.record.url,
            request.rel_url.raw_path_qs,
            headers,
            _body_with_plan(passage, dispatched),
        ) as answer:
            charge.first_byte(router.clock())
            router.turns.look()
            passage.span.first_byte(answer.status)
            _judge(router, worker, answer.status)
            if answer.status == 200:
                passage.note_first_byte(dispatched, charge)
            passed = await pass_on(answer, request, passage.headers(dispatched))
            passage.note_pace(dispatched, charge, passed.events)
    response = passed.response
    if response.status == 200:
        passage.note_reuse(dispatched, passed.whole)
        router.engines.note_prompt(worker.name, len(dispatched.chain))
    return response


def _judge(router: Router, worker: Worker, status: int) -> None:
    """An answer of a worker's own fault counts against it, however it reaches the client."""
    if status >= 500:
        router.traffic.failed(worker.name)
    else:
        router.traffic.succeeded(worker.name)
