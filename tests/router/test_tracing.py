"""Traces: one span a request, a child of the client's, with the decision; the worker's parent."""

import sys

import pytest
from aiohttp import web
from eventually import until
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from prefixfleet.router.tracing import Tracing
from prefixfleet.store.errors import ConfigError

TRACE = "0af7651916cd43dd8448eb211c80319c"
PARENT = f"00-{TRACE}-b7ad6b7169203331-01"
ASK = {"model": "tiny", "prompt": "hello"}


@pytest.fixture
async def collector(rig):
    """A collector; gives its endpoint and the spans that came."""
    spans = []

    async def take(request):
        sent = ExportTraceServiceRequest.FromString(await request.read())
        spans.extend(
            span for r in sent.resource_spans for scope in r.scope_spans for span in scope.spans
        )
        return web.Response(content_type="application/x-protobuf")

    app = web.Application()
    app.router.add_post("/v1/traces", take)
    runner = web.AppRunner(app)
    await runner.setup()
    rig.stack.push_async_callback(runner.cleanup)
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    return f"http://127.0.0.1:{runner.addresses[0][1]}/v1/traces", spans


async def exported(rig, spans):
    import asyncio

    await asyncio.to_thread(rig.router.tracing._provider.force_flush, 10_000)
    await until(lambda: spans)
    return spans


def attributes(span):
    values = {}
    for pair in span.attributes:
        kind = pair.value.WhichOneof("value")
        values[pair.key] = getattr(pair.value, kind)
    return values


async def test_the_span_carries_the_decision_and_leads_into_the_worker(rig, collector):
    endpoint, spans = collector
    engine = await rig.engine()
    await rig.start(engine, otlp_endpoint=endpoint)

    async with rig.client.post(
        "/v1/completions", json=ASK, headers={"traceparent": PARENT}
    ) as response:
        request = response.headers["x-prefixfleet-request"]
    (span,) = await exported(rig, spans)

    assert span.trace_id.hex() == TRACE
    assert span.parent_span_id.hex() == "b7ad6b7169203331"
    found = attributes(span)
    assert found["prefixfleet.request"] == request
    assert found["prefixfleet.worker"] == "a"
    assert found["http.response.status_code"] == 200
    assert {"prefixfleet.queue_s", "prefixfleet.hit_blocks"} <= set(found)
    assert [event.name for event in span.events] == ["decided", "first byte"]
    seen = {name.lower(): value for name, value in engine.seen_headers[0].items()}
    assert seen["traceparent"] == f"00-{TRACE}-{span.span_id.hex()}-01"


async def test_a_refused_request_has_a_span_with_the_reason(rig, collector):
    endpoint, spans = collector
    await rig.start(await rig.engine(), otlp_endpoint=endpoint)

    status, _, _ = await rig.post(model="no such model")
    (span,) = await exported(rig, spans)

    assert status == 404
    assert attributes(span)["error.type"] == "model_not_found"
    assert attributes(span)["http.response.status_code"] == 404


async def test_without_an_endpoint_the_clients_own_parent_passes_through(rig):
    engine = await rig.engine()
    await rig.start(engine)

    headers = {"traceparent": PARENT}
    async with rig.client.post("/v1/completions", json=ASK, headers=headers) as response:
        assert response.status == 200

    seen = {name.lower(): value for name, value in engine.seen_headers[0].items()}
    assert seen["traceparent"] == PARENT


async def test_a_collector_that_is_gone_costs_no_request(rig):
    await rig.start(await rig.engine(), otlp_endpoint="http://127.0.0.1:9/v1/traces")

    assert (await rig.post())[0] == 200


def test_without_the_packages_the_start_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "opentelemetry.sdk.trace", None)

    with pytest.raises(ConfigError, match="otel"):
        Tracing("http://127.0.0.1:9/v1/traces")
