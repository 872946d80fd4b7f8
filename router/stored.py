"""Stored responses: an engine keeps them in its memory, so who asks for one goes to that engine.

Its worker is noted when the answer passes. What goes on from a response, reads or cancels it is
sent there and nowhere else: any other worker would say that there is none.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from prefixfleet.router.admission import admit
from prefixfleet.router.background import response_url
from prefixfleet.router.body import Body
from prefixfleet.router.charge import Charge
from prefixfleet.router.client import Client
from prefixfleet.router.core import Router
from prefixfleet.router.errors import (
    BadRequest,
    PreviousNotFound,
    ResponseNotFound,
    ResponseUnavailable,
)
from prefixfleet.router.examiner import LAST_RETRY_S
from prefixfleet.router.first_token import FirstToken
from prefixfleet.router.for_worker import lines_for_worker
from prefixfleet.router.headers import OURS, REQUEST_ID, AnswerHeaders
from prefixfleet.router.keys import Key
from prefixfleet.router.overheard import Hearer, overheard
from prefixfleet.router.passing import pass_on
from prefixfleet.router.response_ids import Ear
from prefixfleet.router.roster import EXAMINED
from prefixfleet.router.upstream import Answer, WorkerLost, ask
from prefixfleet.router.watch import Passage
from prefixfleet.router.worker import Worker
from prefixfleet.store.errors import IndexUnavailable

PREVIOUS = "previous_response_id"
CHOSEN = "request_id"
"""A field of vLLM's own, which becomes the response's id."""


@dataclass(frozen=True, slots=True)
class _Wish:
    """What is asked of a response's worker: ``label`` of the metric, who may be asked for it."""

    label: str
    states: tuple[str, ...]
    missing: type[ResponseNotFound] = ResponseNotFound
    param: str | None = None


_GO_ON = _Wish("previous", ("ready",), PreviousNotFound, PREVIOUS)
_READ, _CANCEL = _Wish("retrieve", EXAMINED), _Wish("cancel", EXAMINED)


async def pass_noting(
    passage: Passage,
    worker: Worker,
    first_token: Callable[[], None],
    charge: Charge,
    answer: Answer,
    ours: Mapping[str, str],
) -> bytes:
    """`pass_on` for answers that ``worker`` may keep: their id is noted as soon as it has come, in
    the ``charge`` too of what goes on behind it, and ``first_token`` called when the first one of a
    stream has."""
    router, tenant, client = passage.router, passage.key.tenant, passage.client
    broke_off = router.metrics.broken_streams.inc
    if answer.status != 200:
        return await pass_on(answer, client, ours, broke_off)
    hearers: list[Hearer] = [FirstToken(first_token)] if answer.is_event_stream else []
    if passage.body.get("store", bool) is False:
        return await pass_on(overheard(answer, hearers), client, ours, broke_off)

    def note(response: str) -> None:
        router.keepers.note(tenant, response, worker.name)
        if passage.goes_on:
            charge.goes_on = response_url(worker.record.url, response)

    ear = Ear(answer.is_event_stream, note)
    try:
        return await pass_on(overheard(answer, [ear, *hearers]), client, ours, broke_off)
    finally:
        if not ear.done:
            router.metrics.unread_response_ids.inc()


async def previous_keeper(router: Router, key: Key, body: Body, model: str) -> Worker | None:
    """The worker that keeps what ``body`` goes on from; None if it goes on from nothing.

    Raises:
        PreviousNotFound: nobody keeps it, or one that serves another model.
        ResponseUnavailable: its worker gets no requests now, or cannot be looked up.
        BadRequest: the request names its own response, where tenants are told apart.
    """
    if router.files.keys.path is not None and body.is_set(CHOSEN):
        # the id is all that an engine knows of who may read a response: another tenant's could
        # be named, and be read or overwritten
        raise BadRequest(f"{CHOSEN}: with API keys the engine names responses", param=CHOSEN)
    previous = body.get(PREVIOUS, str)
    if previous is None:  # of another type: the engine says so
        return None
    worker = await _keeper(router, key, previous, _GO_ON)
    serving = router.roster.serving(worker.name, model)
    if serving is None:
        raise PreviousNotFound(
            f"{_named(previous)} not found for the model {model!r:.80}: it is of "
            f"{worker.record.model!r}.",
            param=PREVIOUS,
        )
    return serving


def keeper_failed(worker: Worker, loss: WorkerLost) -> ResponseUnavailable:
    """The refusal of a request that went to the one worker that keeps a response."""
    return ResponseUnavailable(
        f"worker {worker.name}, which alone keeps the response, failed: {loss}",
        retry_after_s=loss.retry_after_s,
    )


async def serve_stored(router: Router, client: Client, response: str, method: str) -> int:
    """Answer a GET or HEAD of a response, or the POST that cancels it; the status.

    A worker that is drained still answers: what it began in the background ends there.

    Raises:
        Refusal: see `previous_keeper`.
    """
    key = admit(router, client.headers)
    try:
        body = await client.read() if method == "POST" else b""
        worker = await _keeper(router, key, response, _CANCEL if method == "POST" else _READ)
        try:
            return await _exchange(router, client, worker, method, body)
        except WorkerLost as loss:
            if loss.reason != "status":
                router.traffic.failed(worker.name)
                router.roster.lost(worker.name, str(loss))
            raise keeper_failed(worker, loss) from loss
    finally:
        router.limits.leave(key)


async def _exchange(
    router: Router, client: Client, worker: Worker, method: str, body: bytes
) -> int:
    lines = lines_for_worker(router, client)
    ours = {
        REQUEST_ID: client.called,
        OURS + "request": client.id,
        OURS + "node": worker.record.node,
    }
    as_asked = "POST" if method == "POST" else "GET"
    answer = await ask(router.pool, worker.record.url, client.target, lines, body, as_asked)
    try:
        if method == "HEAD":
            headers = AnswerHeaders(ours, answer.head.passing, answer.content_length)
            client.answer(answer.status, headers, b"")
        else:
            await pass_on(answer, client, ours, router.metrics.broken_streams.inc)
    finally:
        answer.release()
    return answer.status


async def _keeper(router: Router, key: Key, response: str, wish: _Wish) -> Worker:
    """The worker that keeps it, where that may be asked for such a thing."""
    told, param = _named(response), wish.param

    def count(result: str) -> None:
        router.metrics.stored_responses.labels(wish.label, result).inc()

    try:
        name = await router.keepers.worker_of(key.tenant, response)
    except IndexUnavailable:
        count("unavailable")
        why = f"{told} cannot be looked up at the moment"
        raise ResponseUnavailable(why, param=param, retry_after_s=1.0) from None
    if not name:
        count("unknown")
        raise wish.missing(f"{told} not found.", param=param)
    state, worker = router.roster.seated(name)
    if not state and router.roster.is_whole():
        count("gone")
        raise wish.missing(f"{told} not found: worker {name}, which kept it, is gone.", param=param)
    if worker is None or state not in wish.states:
        count("unavailable")
        why = f"{told} is kept by worker {name}, which is {state or 'not here yet'}"
        raise ResponseUnavailable(why, param=param, retry_after_s=LAST_RETRY_S)
    count("found")
    return worker


def _named(response: str) -> str:
    return f"Response with id {response!r:.80}"
