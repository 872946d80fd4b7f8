"""The reports of replay and plan in a headless Chromium: no complaint, wide or on a phone."""

import asyncio
import json

import pytest
from browser import CHROMIUM, WIDER, browser_at
from openai_endpoint import Endpoint, line
from simulated_conversations import conversations, write_trace

from prefixfleet.router import plan, replay

pytestmark = [
    pytest.mark.skipif(CHROMIUM is None, reason="no chromium here: apt-get install chromium"),
    pytest.mark.timeout(300),
]
MODEL = {
    "num_hidden_layers": 80, "hidden_size": 8192, "intermediate_size": 28672,
    "num_attention_heads": 64, "num_key_value_heads": 8, "torch_dtype": "bfloat16",
}  # fmt: skip
WINDOWS = pytest.mark.parametrize("width", [375, 1280])


async def looked_at(page, width, plots):
    async with browser_at(page.as_uri(), viewport={"width": width, "height": 800}) as watched:
        await watched.page.goto(watched.base)
        shown = await watched.page.locator("canvas").count()
        assert await watched.page.evaluate(WIDER) == 0
        text = await watched.page.locator("body").inner_text()
    assert watched.complaints == []
    assert {url for url in watched.asked if not url.startswith("data:")} == {page.as_uri()}
    assert shown == plots
    return text


@WINDOWS
async def test_two_replays_side_by_side(tmp_path, capsys, width):
    trace, page = tmp_path / "trace.jsonl", tmp_path / "run.html"
    trace.write_text("\n".join(line(20 * n) for n in range(5)))
    with Endpoint() as endpoint:
        words = ["--trace", str(trace), "--endpoint", endpoint.url]
        out = ["--out", str(tmp_path / "other.json")]
        assert await asyncio.to_thread(replay.main, words + out) == 0
        words += ["--compare", out[1], "--html", str(page)]
        assert await asyncio.to_thread(replay.main, words) == 0

    text = await looked_at(page, width, plots=3)

    assert text.count(endpoint.url) == 2
    assert "99 of 100 requests reach at least" in text


@WINDOWS
async def test_a_plan(tmp_path, capsys, width):
    trace, page = tmp_path / "trace.jsonl", tmp_path / "plan.html"
    write_trace(trace, conversations(10, 5))
    (tmp_path / "config.json").write_text(json.dumps(MODEL))
    words = ["--trace", str(trace), "--model", str(tmp_path), "--hardware", "8xA800"]
    words += ["--nodes", "2", "--dram-gb", "1", "--ssd-gb", "500", "--html", str(page)]
    assert await asyncio.to_thread(plan.main, words) == 0

    text = await looked_at(page, width, plots=3)

    assert "The cache is worth it" in text
    assert "PREFIXFLEET_NODE_SSD_BYTES=" in text
