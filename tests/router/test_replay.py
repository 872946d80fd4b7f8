"""The replay against a real endpoint: timed from outside, errors counted, a report to read."""

import json

import pytest
from openai_endpoint import Endpoint, line
from trace_forms import FORMS, write_form

from prefixfleet.router import replay
from prefixfleet.router.replay_client import Sample, request_body
from prefixfleet.router.replay_report import render_html
from prefixfleet.router.replay_run import load_run
from prefixfleet.router.replay_stats import hit_rate, summarise, tbt
from prefixfleet.store.errors import ConfigError


@pytest.fixture
def endpoint():
    with Endpoint() as running:
        yield running


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


def replayed(endpoint, tmp_path, capsys):
    (tmp_path / "trace.jsonl").write_text(line(0))
    replay.main(["--trace", str(tmp_path / "trace.jsonl"), "--endpoint", endpoint.url])
    return json.loads(capsys.readouterr().out)


@pytest.mark.parametrize(
    "usage",
    [
        {"prompt_tokens": -5, "completion_tokens": 1},
        {"prompt_tokens": 10, "prompt_tokens_details": {"cached_tokens": -180}},
        {"prompt_tokens": 10, "prompt_tokens_details": {"cached_tokens": 180}},
        {"prompt_tokens": 10, "completion_tokens": 1 << 60},
    ],
)
def test_numbers_that_are_none_of_tokens_are_an_error_of_that_answer(
    endpoint, tmp_path, capsys, usage
):
    endpoint.usage = usage

    figures = replayed(endpoint, tmp_path, capsys)

    assert figures["errors"] == 1
    assert figures["hit_rate"]["mean"] == 0


@pytest.mark.parametrize(
    "delta",
    [
        {"reasoning_content": "hm"}, {"reasoning": "hm"}, {"content": "", "reasoning": "hm"},
        {"tool_calls": [{"index": 0, "function": {"name": "f"}}]},
    ],
    ids=str,
)  # fmt: skip
def test_thoughts_and_calls_are_an_answer_too(endpoint, tmp_path, capsys, delta):
    endpoint.chunks = [{"choices": [{"delta": delta}]}]

    figures = replayed(endpoint, tmp_path, capsys)

    assert figures["errors"] == 0
    assert figures["ttft_s"]["mean"] > 0


@pytest.mark.parametrize(
    "text",
    ['{"trace": 1, "figures": 2, "samples": 3}', "[]", "{}", "", "7",
     '{"trace": "t", "endpoint": "e", "figures": {}, "samples": []}'],
)  # fmt: skip
def test_a_run_to_compare_with_is_checked_like_every_file(tmp_path, text):
    (tmp_path / "run.json").write_text(text)

    with pytest.raises(ConfigError, match=r"--compare .*expected a run"):
        load_run(tmp_path / "run.json")


@pytest.mark.parametrize(
    ("words", "what"),
    [(["--limit", "0"], "got 0, expected a whole number"), (["--speed", "x"], "got x, expected")],
)
def test_a_wrong_number_is_told_with_what_is_expected(capsys, words, what):
    with pytest.raises(SystemExit):
        replay.parser().parse_args(["--trace", "t", "--endpoint", "e", *words])
    assert what in " ".join(capsys.readouterr().err.split())
