"""`prefixfleet top`: the router's snapshot in a terminal."""

import asyncio
import io

import aiohttp
import pytest
from aiohttp import web
from rich.console import Console

from prefixfleet.router.dashboard import snapshot_of
from prefixfleet.router.top import main, read_snapshot, screen


def shown(snap, lost=""):
    console = Console(file=io.StringIO(), width=160, record=True)
    console.print(screen(snap, lost))
    return console.export_text()


async def test_it_shows_what_the_dashboard_shows(rig):
    await rig.start(await rig.engine())
    await rig.post(prompt="the quick brown fox " * 40)
    await rig.post(prompt="the quick brown fox " * 40)
    base = f"http://127.0.0.1:{rig.runner.addresses[0][1]}"
    async with aiohttp.ClientSession() as session:
        text = shown(await read_snapshot(session, base))

    assert "1 of 1 workers ready; 2 requests" in text
    assert "node-a" in text
    assert "least estimate" in text
    assert snapshot_of(rig.router)["prefixes"][0]["prefix"] in text
    assert await asyncio.to_thread(main, ["--endpoint", base, "--once"]) == 0


async def test_what_is_degraded_and_a_router_that_went_away_are_said(rig):
    router = await rig.start(await rig.engine())
    router.degraded.enter("index", "changes do not arrive", "check Redis")

    text = shown(snapshot_of(router), lost="does not answer")

    assert "changes do not arrive; check Redis" in text
    assert "does not answer" in text


def test_no_router_is_an_error_that_says_what_to_do(capsys):
    assert main(["--endpoint", "http://127.0.0.1:9", "--once"]) == 2
    assert "--endpoint names another one" in " ".join(capsys.readouterr().err.split())


@pytest.mark.parametrize("options", [["--interval", "0"], ["--interval", "x"]])
def test_wrong_options_are_refused(options):
    with pytest.raises(SystemExit) as ended:
        main(options)
    assert ended.value.code == 2


@pytest.mark.parametrize("body", ["{}", "[]", "7", '{"nodes": [{"node": "a"}]}'])
async def test_what_is_no_routers_snapshot_is_an_error(body, capsys):
    async def answer(request):
        return web.Response(text=body, content_type="application/json")

    app = web.Application()
    app.router.add_get("/dashboard/snapshot", answer)
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    words = ["--endpoint", f"http://127.0.0.1:{runner.addresses[0][1]}", "--once"]

    assert await asyncio.to_thread(main, words) == 2

    assert "expected a router's snapshot" in " ".join(capsys.readouterr().err.split())
    await runner.cleanup()
