"""A prompt's way through the router: read it, choose, send, watch what happens.

The rules: the load is charged before the request is sent and released however it ends; until the
client got its first byte another worker may be asked, after it never; a client that leaves
cancels the request upstream (its handler is cancelled, which closes the connection).
"""

import asyncio
from collections.abc import Awaitable, Mapping, Sequence, Set
from functools import partial

from msgspec import structs

from prefixfleet.router.admission import admit
from prefixfleet.router.arrivals import newcomers, patience_s, ready_by, there_now
from prefixfleet.router.body import Body, read_body
from prefixfleet.router.charge import Charge
from prefixfleet.router.client import Client
from prefixfleet.router.core import Router
from prefixfleet.router.dispatch import Chains, Dispatched
from prefixfleet.router.errors import BadRequest, Forbidden, TooLate, UpstreamFailed
from prefixfleet.router.for_worker import body_for_worker, lines_for_worker
from prefixfleet.router.headers import DEADLINE, KEEP, KeepWish, deadline_of, keep_of
from prefixfleet.router.in_step import in_step
from prefixfleet.router.keys import Key
from prefixfleet.router.passing import pass_on
from prefixfleet.router.prompt import Prompt
from prefixfleet.router.routes import Route, is_anthropic
from prefixfleet.router.stored import PREVIOUS, keeper_failed, pass_noting, previous_keeper
from prefixfleet.router.tracing import NO_SPAN, RequestSpan
from prefixfleet.router.upstream import Answer, WorkerLost, ask
from prefixfleet.router.watch import Passage
from prefixfleet.router.worker import Worker
from prefixfleet.store.keep import Keep

MAX_SENDS = 3  # a request that kills its engine shall not kill them all
UNLOADED = "adapter"  # the engine has it no more, and its worker has not said so yet
INLINE_BYTES = 4_096  # a longer body is tokenised in a thread: it takes a millisecond and more


def serve_prompt(router: Router, client: Client, route: Route) -> Awaitable[int]:
    """Answer one request whose prompt decides where it goes; the status. Raises `Refusal`."""
    if not router.tracing.on:
        return _serve(router, client, route, NO_SPAN)
    return _traced(router, client, route)


async def _traced(router: Router, client: Client, route: Route) -> int:
    with router.tracing.request(route.path, client.headers) as span:
        return await _serve(router, client, route, span)


async def _serve(router: Router, client: Client, route: Route, span: RequestSpan) -> int:
    received_s = router.clock()
    key = admit(router, client.headers)
    try:
        body = read_body(await client.read())
        model = body.get("model", str)
        if model is None:
            raise BadRequest("the field 'model' is missing or no text", param="model")
        deadline_s = deadline_of(client.headers)
        until_s = received_s + patience_s(router.settings, key, deadline_s)
        keeper = await previous_keeper(router, key, body, model) if route.stores else None
        workers = (
            [keeper] if keeper else router.traffic.allowed(await ready_by(router, model, until_s))
        )
        await in_step()
        prompt, chains = await _understand(router, body, route, key, workers)
        await in_step()
        router.limits.charge_tokens(key, prompt.tokens)
        passage = Passage(
            router=router,
            client=client,
            route=route,
            key=key,
            body=body,
            prompt=prompt,
            received_s=received_s,
            deadline_s=deadline_s,
            keep=_keep(client.headers, key),
            id=client.id,
            span=span,
            bound=PREVIOUS if keeper else "",
        )
        passage.note_prompt()
        return await _try_workers(passage, workers, chains, until_s)
    finally:
        router.limits.leave(key)


def _keep(headers: Mapping[str, str], key: Key) -> KeepWish:
    wish = keep_of(headers)
    if wish.ttl_s and not key.may_keep:
        raise Forbidden(f"{KEEP}: this API key may not keep prefixes; 'may_keep' of the key file")
    return wish


async def _understand(
    router: Router, body: Body, route: Route, key: Key, workers: Sequence[Worker]
) -> tuple[Prompt, Chains]:
    """The prompt and its chains; off the event loop if that takes long."""

    def read() -> tuple[Prompt, Chains]:
        prompt = route.read_prompt(body, workers[0].tokens, key.tenant)
        salt = router.salt_of(key, prompt.salt)
        if salt != prompt.salt:
            prompt = structs.replace(prompt, salt=salt)
        return prompt, router.dispatcher.chains(prompt, workers)

    started_s = router.clock()
    try:
        if len(body.raw) <= INLINE_BYTES:
            return read()
        return await asyncio.get_running_loop().run_in_executor(router.threads, read)
    finally:
        router.metrics.tokenise_s.observe(router.clock() - started_s)


async def _try_workers(
    passage: Passage, workers: Sequence[Worker], chains: Chains, until_s: float
) -> int:
    router = passage.router
    left = list(workers)
    unwilling: set[str] = set()  # they answered, with a refusal
    asked: set[str] = set()
    failures: list[WorkerLost] = []
    while left and len(failures) < MAX_SENDS:
        dispatched = await router.turns.wait(
            passage.id,
            passage.prompt,
            chains,
            left,
            passage.received_s,
            passage.key,
            passage.deadline_s,
            tuple if passage.bound else partial(there_now, passage, chains, asked),
        )
        asked.add(dispatched.worker.name)
        may_ask_another = len(left) > 1 and len(failures) + 1 < MAX_SENDS
        try:
            return await _send(passage, dispatched, unwilling, may_ask_another)
        except WorkerLost as loss:
            failures.append(loss)
            left = [worker for worker in left if worker.name not in asked]
            router.metrics.retries.labels(loss.reason).inc()
            if loss.reason == "status":
                unwilling.add(dispatched.worker.name)  # whose fault it is shows the next answer
            elif loss.reason != UNLOADED:  # which serves its other models as before
                router.traffic.failed(dispatched.worker.name)
                router.roster.lost(dispatched.worker.name, str(loss))
            if passage.bound:
                raise keeper_failed(dispatched.worker, loss) from loss
            if not left and len(failures) < MAX_SENDS:
                left = await newcomers(passage, chains, unwilling, until_s)
                asked = set(unwilling)
    raise UpstreamFailed(
        "no worker answered: " + "; ".join(map(str, failures)),
        retry_after_s=min(loss.retry_after_s for loss in failures),
    )


async def _send(
    passage: Passage, dispatched: Dispatched, unwilling: Set[str], may_ask_another: bool
) -> int:
    """The answer of the chosen worker. Raises `WorkerLost` while the client has nothing of it."""
    router, worker = passage.router, dispatched.worker
    passage.say_why(dispatched)
    node = router.feed.records.get(worker.record.node)
    router.hints.send(node.http if node else "", dispatched)
    charge = router.book.charge(
        worker.name,
        tokens=max(1, passage.prompt.tokens - dispatched.cached_tokens),
        sequences=passage.prompt.outputs,
        expected_s=dispatched.decision.prefill_s,
        streamed=passage.is_streamed,
    )
    try:
        await in_step()
        status, body = await _exchange(passage, dispatched, charge, unwilling, may_ask_another)
    finally:
        if charge.goes_on:
            router.background.follow(charge)
        else:
            router.book.release(charge)
            router.turns.look()  # its end may be another one's turn
    if status == 200:
        passage.note_reuse(dispatched, body)
        router.engines.note_prompt(worker.name, len(dispatched.chain))
        if passage.keep.ttl_s and dispatched.chain and not worker.static:
            chain = tuple(dispatched.chain)
            ttl_s, priority = passage.keep
            wish = Keep(namespace=worker.namespace, chain=chain, ttl_s=ttl_s, priority=priority)
            router.wishes.send(worker.record.node, wish)
    return status


async def _in_time(passage: Passage, asking: Awaitable[Answer]) -> Answer:
    """What ``asking`` gives within the client's own limit. Raises `TooLate`: the engine is told."""
    left_s = passage.received_s + passage.deadline_s - passage.router.clock()
    try:
        async with asyncio.timeout(left_s):
            return await asking
    except TimeoutError:
        raise TooLate(
            f"no first byte within {passage.deadline_s:g} s, as {DEADLINE} asks"
        ) from None


async def _exchange(
    passage: Passage,
    dispatched: Dispatched,
    charge: Charge,
    unwilling: Set[str],
    may_ask_another: bool,
) -> tuple[int, bytes]:
    """Status of the answer, and its body where that was held."""
    router, worker, client = passage.router, dispatched.worker, passage.client
    body = body_for_worker(passage, dispatched)
    lines = lines_for_worker(router, client, passage.span)
    asking = ask(router.pool, worker.record.url, client.target, lines, body)
    answer = await (_in_time(passage, asking) if passage.deadline_s else asking)
    stores, status = passage.route.stores, answer.status
    goes_on = status == 200 and passage.goes_on

    def prefilled() -> None:
        if not goes_on or answer.is_event_stream:
            charge.first_byte(router.clock(), refused=status >= 400)
            router.turns.look()
        if status == 200:
            passage.note_first_byte(dispatched, charge)

    try:
        if status == 404 and worker.adapter and may_ask_another:
            raise WorkerLost(UNLOADED, f"{answer.url}: it has not {worker.adapter!r:.80} any more")
        if status < 500 and not (stores and status == 200 and answer.is_event_stream):
            prefilled()
        passage.span.first_byte(status)
        if status >= 500 and may_ask_another and router.traffic.doubts(worker.name):
            raise WorkerLost("status", f"{answer.url}: status {status}")
        router.traffic.answered(worker.name, status, unwilling)
        ours = passage.headers(dispatched)
        if stores:
            held = await pass_noting(passage, worker, prefilled, charge, answer, ours)
        else:
            held = await pass_on(
                answer,
                client,
                ours,
                router.metrics.broken_streams.inc,
                anthropic=is_anthropic(passage.route.path),
            )
        if answer.is_event_stream:
            charge.goes_on = ""  # all of it has come
    finally:
        answer.release()
    passage.note_pace(dispatched, charge, client.events)
    return status, held
