"""The replay against a real endpoint: timed from outside, errors counted, a report to read."""

import asyncio
import json
import threading

import pytest
from aiohttp import web
from trace_forms import FORMS, write_form

from prefixfleet.router import replay
from prefixfleet.router.replay_client import Sample, request_body
from prefixfleet.router.replay_report import render_html
from prefixfleet.router.replay_stats import hit_rate, summarise, tbt


class Endpoint:
    """A small OpenAI endpoint on a thread of its own; owned by the test that started it."""

    def __init__(self):
        self.bodies = []
        self.url = ""
        self._loop = asyncio.new_event_loop()
        self._ready = threading.Event()
        self._thread = threading.Thread(target=self._loop.run_until_complete, args=(self._run(),))
        self._stop = asyncio.Event()

    def __enter__(self):
        self._thread.start()
        assert self._ready.wait(60)
        return self

    def __exit__(self, *exc):
        self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join(10)
        self._loop.close()

    async def _run(self):
        app = web.Application()
        app.router.add_get("/v1/models", self._models)
        app.router.add_post("/v1/chat/completions", self._answer)
        app.router.add_post("/v1/completions", self._answer)
        runner = web.AppRunner(app)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        self.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
        self._ready.set()
        await self._stop.wait()
        await runner.cleanup()

    async def _models(self, request):
        return web.json_response({"data": [{"id": "tiny"}]})

    async def _answer(self, request):
        body = await request.json()
        self.bodies.append((request.path, body))
        if body.get("max_tokens") == 13:
            return web.json_response({"error": {"message": "</script>"}}, status=500)
        response = web.StreamResponse(headers={"x-prefixfleet-node": "a"})
        await response.prepare(request)
        chunks = [{"choices": [{"text": "hi"}]}, {"choices": [{"delta": {"content": "you"}}]}]
        usage = {"prompt_tokens": 100, "completion_tokens": 2}
        usage["prompt_tokens_details"] = {"cached_tokens": 40}
        for chunk in [*chunks, {"choices": [], "usage": usage}]:
            await response.write(b"data: " + json.dumps(chunk).encode() + b"\n\n")
        if body.get("max_tokens") != 14:
            await response.write(b"data: [DONE]\n\n")
        return response


@pytest.fixture
def endpoint():
    with Endpoint() as running:
        yield running


def line(at_ms, output=2):
    return json.dumps(
        {"timestamp": at_ms, "input_length": 600, "output_length": output, "hash_ids": [0, at_ms]}
    )


def test_a_trace_is_replayed_and_reported(endpoint, tmp_path, capsys):
    trace = tmp_path / "trace.jsonl"
    trace.write_text("\n".join([line(0), line(20), line(40)]))
    out, html = tmp_path / "run.json", tmp_path / "run.html"

    code = replay.main(
        ["--trace", str(trace), "--endpoint", endpoint.url, "--out", str(out), "--html", str(html)]
    )

    figures = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert code == 0
    assert (figures["requests"], figures["errors"]) == (3, 0)
    assert figures["hit_rate"]["mean"] == pytest.approx(0.4)
    assert figures["nodes"] == {"a": 3}
    assert {body["model"] for _, body in endpoint.bodies} == {"tiny"}
    assert json.loads(out.read_text())["samples"][0]["ttft_s"] > 0
    assert "uPlot" in html.read_text()


@pytest.mark.parametrize("form", FORMS)
def test_every_form_of_trace_is_replayed(endpoint, tmp_path, capsys, form):
    trace = write_form(tmp_path / "trace.jsonl", form)

    assert replay.main(["--trace", str(trace), "--endpoint", endpoint.url, "--speed", "10"]) == 0

    assert json.loads(capsys.readouterr().out.splitlines()[-1])["requests"] == 12
    prompts = [b["messages"][0]["content"] if "messages" in b else b["prompt"]
               for _, b in endpoint.bodies]  # fmt: skip
    turns = sorted(prompts, key=len)
    assert len(turns) == 12
    assert sum(turns[-1].startswith(turn) for turn in turns) == 3


def test_failed_requests_are_counted_by_kind_and_change_the_exit_code(endpoint, tmp_path, capsys):
    """An HTTP error and a stream cut short are both errors, and the rest still counts."""
    trace = tmp_path / "trace.jsonl"
    trace.write_text("\n".join([line(0), line(1, 13), line(2, 14)]))

    code = replay.main(["--trace", str(trace), "--endpoint", endpoint.url, "--speed", "100"])

    figures = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert code == 1
    assert figures["errors"] == 2
    assert "HTTP 500" in figures["errors_by_kind"]


@pytest.mark.parametrize(
    "arguments",
    [
        ["--trace", "absent", "--endpoint", "http://127.0.0.1:9"],
        ["--trace", "TRACE", "--endpoint", "http://127.0.0.1:9"],
        ["--trace", "TRACE", "--endpoint", "http://127.0.0.1:9", "--compare", "TRACE"],
    ],
)
def test_wrong_files_and_a_dead_endpoint_are_told_and_nothing_is_printed(
    arguments, tmp_path, capsys
):
    trace = tmp_path / "trace.jsonl"
    trace.write_text(line(0))

    code = replay.main([str(trace) if a == "TRACE" else a for a in arguments])

    said = capsys.readouterr()
    assert code == 2
    assert said.out == ""
    assert "prefixfleet replay:" in said.err


@pytest.mark.parametrize("speed", ["0", "-1", "nan", "inf", "fast"])
def test_a_speed_that_is_no_speed_is_refused(speed):
    with pytest.raises(SystemExit):
        replay.parser().parse_args(["--trace", "t", "--endpoint", "e", "--speed", speed])


def test_a_request_keeps_what_the_trace_says_and_streams():
    path, body = request_body(
        {"messages": [], "tools": [1], "max_completion_tokens": 9}, model="m", output_tokens=3
    )

    assert path == "/chat/completions"
    assert body["tools"] == [1]
    assert body["max_tokens"] == 3
    assert "max_completion_tokens" not in body


def test_the_hit_rates_low_tail_is_the_unlucky_requests():
    samples = [
        Sample(sent_s=0, late_s=0, prompt_tokens=100, cached_tokens=c) for c in (0, 80, 90, 100)
    ]

    rate = hit_rate(samples)

    assert rate == {"mean": 0.675, "p50": 0.9, "p90": 0.0, "p99": 0.0}


def test_time_between_tokens_is_the_mean_of_the_longest_tenth():
    assert tbt([1.0] * 18 + [3.0, 5.0]) == 4.0
    assert tbt([]) == 0.0


def test_an_empty_run_adds_up_to_zeros():
    assert summarise([], wall_s=0.0, ttft_slo_s=1, tbt_slo_s=1)["requests"] == 0


def test_a_servers_text_cannot_end_the_reports_script():
    page = render_html([{"trace": "</script><b>", "endpoint": "", "figures": {}, "samples": []}])

    assert "</script><b>" not in page
