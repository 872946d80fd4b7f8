"""A headless Chromium, and a page with everything that it asked for and complained of."""

import shutil
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from playwright.async_api import ConsoleMessage, Page, async_playwright

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
PATIENCE_MS = 60_000
WIDER = "document.documentElement.scrollWidth - document.documentElement.clientWidth"
"""Pixels by which a page is wider than its window."""


class Watched:
    """A page of what is served at ``base``."""

    def __init__(self, page: Page, base: str) -> None:
        self.page, self.base = page, base
        self.asked: list[str] = []
        self.complaints: list[str] = []
        page.on("request", lambda request: self.asked.append(request.url))
        page.on("pageerror", lambda error: self.complaints.append(str(error)))
        page.on("console", self._console)

    def _console(self, message: ConsoleMessage) -> None:
        if message.type in ("error", "warning"):
            self.complaints.append(message.text)


@asynccontextmanager
async def browser_at(base: str, **options: Any) -> AsyncIterator[Watched]:
    """A page of its own browser."""
    async with async_playwright() as playwright:
        browser = await playwright.chromium.launch(
            executable_path=CHROMIUM, args=["--no-sandbox", "--disable-background-networking"]
        )
        page = await browser.new_page(**options)
        page.set_default_timeout(PATIENCE_MS)
        yield Watched(page, base)
        await browser.close()
