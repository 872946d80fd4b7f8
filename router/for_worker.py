"""What a worker gets of a request: the client's body and headers, with the plan in them. Pure."""

from typing import Any

from msgspec import Raw, json
from multidict import CIMultiDict

from prefixfleet.router.body import TRANSFER_KEY, with_fields
from prefixfleet.router.client import Client
from prefixfleet.router.core import Router
from prefixfleet.router.dispatch import Dispatched
from prefixfleet.router.headers import REQUEST_ID, lines_of, worker_lines
from prefixfleet.router.pull_or_compute import LOAD_S
from prefixfleet.router.static_workers import remote_kv_source
from prefixfleet.router.tracing import NO_SPAN, RequestSpan
from prefixfleet.router.watch import Passage
from prefixfleet.store.records import PARAMS_KEY, PullPlan

_NO_PULL = json.encode({PARAMS_KEY: PullPlan(request="\0", budget_s=LOAD_S)}).split(b'"\\u0000"')


def body_for_worker(passage: Passage, dispatched: Dispatched) -> bytes:
    """The body, with what the worker's node shall do; where a client said that, it is dropped."""
    route, fields = passage.route, {}
    if route.takes_plan:
        fields = _transfer(passage, dispatched)
    if route.computes and not passage.key.shared_cache:
        fields["cache_salt"] = passage.prompt.salt
    return with_fields(passage.body, fields) if fields else passage.body.raw


def _transfer(passage: Passage, dispatched: Dispatched) -> dict[str, Any]:
    source = dispatched.decision.source
    if not dispatched.worker.static:
        return {TRANSFER_KEY: _params(dispatched)}
    if source and (address := passage.router.p2p_addresses().get(source.node)):
        return {TRANSFER_KEY: remote_kv_source(address, passage.id)}
    if passage.body.has(TRANSFER_KEY):
        return {TRANSFER_KEY: None}  # a client must not send an engine to fetch from anywhere
    return {}


def _params(dispatched: Dispatched) -> object:
    decision = dispatched.decision
    if decision.source is not None or decision.load_within_s != LOAD_S:
        return {PARAMS_KEY: dispatched.plan}
    before, after = _NO_PULL  # most plans: nothing but the request's id in them
    return Raw(before + json.encode(dispatched.request) + after)


def lines_for_worker(router: Router, client: Client, span: RequestSpan = NO_SPAN) -> str:
    """Lines of its head but for host and length, with the request's name as the client has it."""
    with_key = router.files.keys.path is None
    given = client.headers.get(REQUEST_ID)
    more: dict[str, str] = {} if given == client.called else {REQUEST_ID: client.called}
    span.carry(more)
    if "traceparent" not in more and (given is None or not more):
        return client.worker_lines(with_key) + lines_of(more.items())
    left = [(n, v) for n, v in client.headers.items() if n.lower() not in more]
    return worker_lines(CIMultiDict(left), with_key=with_key) + lines_of(more.items())
