"""The dashboard in a headless Chromium: it loads, lives, survives, and can be read by everybody."""

import hashlib
from urllib.parse import urlsplit

import pytest
from aiohttp import web
from browser import CHROMIUM, PATIENCE_MS, WIDER, browser_at
from playwright.async_api import expect
from upstreams import SECRET

from prefixfleet.router.__main__ import app_runner
from prefixfleet.router.core import Router
from prefixfleet.router.fleet import Fleet
from prefixfleet.router.settings import RouterSettings

pytestmark = [
    pytest.mark.skipif(CHROMIUM is None, reason="no chromium here: apt-get install chromium"),
    pytest.mark.timeout(300),
]
TIERS = {"dram": {"slots": 1000, "resident": 400, "pinned": 3, "slot_bytes": 1 << 20}}


async def open_live(watched):
    await watched.page.goto(watched.base + "/dashboard")
    await expect(watched.page.locator("#connection")).to_have_text("live", timeout=PATIENCE_MS)


def base_of(rig):
    return f"http://127.0.0.1:{rig.runner.addresses[0][1]}"


async def ask(rig, text="the quick brown fox " * 40):
    body = {"model": "tiny", "prompt": text, "stream": True}
    async with rig.client.post("/v1/completions", json=body) as response:
        await response.read()
        return response.headers["x-prefixfleet-request"]


async def test_it_shows_a_request_that_was_just_made_and_loads_nothing_from_elsewhere(rig):
    await rig.start(await rig.engine())
    async with browser_at(base_of(rig)) as watched:
        await open_live(watched)
        request = await ask(rig)

        row = watched.page.locator(f'#decisions tr[data-request="{request}"]')
        await expect(row).to_contain_text("least estimate", timeout=PATIENCE_MS)
        await expect(row).to_contain_text("node-a")
        await expect(watched.page.locator("#now")).to_contain_text("requests so far")
        await expect(watched.page.locator("#ttft canvas")).to_have_count(1, timeout=PATIENCE_MS)

    assert watched.complaints == []
    assert {urlsplit(url).hostname for url in watched.asked if url.startswith("http")} == {
        "127.0.0.1"
    }


async def test_it_survives_the_restart_of_its_router(rig):
    engine = await rig.engine()
    await rig.start(engine)
    port = rig.runner.addresses[0][1]
    async with browser_at(base_of(rig)) as watched:
        await open_live(watched)
        await rig.runner.cleanup()
        connection = watched.page.locator("#connection")
        await expect(connection).to_contain_text("does not answer", timeout=PATIENCE_MS)

        fleet = Fleet(rig.index, rig.registry, SECRET)
        async with Router(fleet, RouterSettings(port=0)) as rig.router:
            rig.runner = app_runner(rig.router)
            await rig.runner.setup()
            await web.TCPSite(rig.runner, "127.0.0.1", port, reuse_address=True).start()
            await rig.until_ready(1)
            await expect(connection).to_have_text("live", timeout=PATIENCE_MS)
            request = await ask(rig)
            row = watched.page.locator(f'#decisions tr[data-request="{request}"]')
            await expect(row).to_have_count(1, timeout=PATIENCE_MS)
            await rig.runner.cleanup()


async def test_a_key_is_asked_for_where_one_is_needed(rig, tmp_path):
    digest = hashlib.sha256(b"s3cret").hexdigest()
    entry = f'{{"name": "o", "sha256": "{digest}", "tenant": "t", "dashboard": true}}'
    keys = tmp_path / "keys.json"
    keys.write_text(f'{{"keys": [{entry}]}}')
    await rig.start(await rig.engine(), keys_file=keys)
    async with browser_at(base_of(rig)) as watched:
        page = watched.page
        await page.goto(watched.base + "/dashboard")
        await page.get_by_label("API key").fill("s3cret")
        await page.keyboard.press("Enter")

        await expect(page.locator("#connection")).to_have_text("live", timeout=PATIENCE_MS)
        await expect(page.locator("#key-form")).to_be_hidden()


async def test_it_fits_a_phone_and_a_hundred_nodes(rig):
    await rig.start(await rig.engine())
    async with browser_at(base_of(rig), viewport={"width": 375, "height": 800}) as watched:
        await watched.page.route("**/dashboard/snapshot", with_nodes(100))
        await open_live(watched)

        await expect(watched.page.locator("#nodes li")).to_have_count(100, timeout=PATIENCE_MS)
        assert await watched.page.evaluate(WIDER) == 0


def with_nodes(count):
    async def answer(route):
        snap = await (await route.fetch()).json()
        snap["nodes"] = [
            {
                "node": f"node-{i:03}",
                "lease": "suspect" if i == 7 else "held",
                "stats": {"tiers": TIERS, "engines": 1},
            }
            for i in range(count)
        ]
        await route.fulfill(json=snap)

    return answer


async def test_it_can_be_read_without_seeing_and_used_without_a_mouse(rig):
    await rig.start(await rig.engine())
    await ask(rig)
    async with browser_at(base_of(rig)) as watched:
        await open_live(watched)
        page = watched.page

        assert await page.locator("main, header").count() == 2
        for section in await page.locator("section:visible").all():
            assert await page.locator("#" + await section.get_attribute("aria-labelledby")).count()
        tables = await page.locator(".plot ~ details table").count()
        assert tables == await page.locator(".plot").count()
        assert await page.locator("[role=img]:not([aria-label])").count() == 0
        await page.keyboard.press("Tab")
        assert await page.evaluate("document.activeElement.textContent") == "Skip to the figures"
        await page.keyboard.press("Enter")
        await page.keyboard.press("Tab")
        assert await page.evaluate("document.activeElement.tagName") == "SUMMARY"
        await page.keyboard.press("Enter")
        await expect(page.locator("#nodes-table")).to_be_visible()
