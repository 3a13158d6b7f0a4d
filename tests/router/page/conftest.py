"""Debian's Chromium, driven by Playwright, in front of the app of `site_of`: fake workers, real HTTP."""

import contextlib
from collections.abc import AsyncIterator
from dataclasses import dataclass, field

import pytest
import pytest_asyncio
from playwright.async_api import Browser, ConsoleMessage, Page, async_playwright

from tests.deploy.programs import environment, needed

QUIET = (
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
)


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def chromium() -> AsyncIterator[Browser]:
    """One for all tests, each of which opens windows of its own, with nothing remembered."""
    path = needed("chromium")
    async with async_playwright() as playwright:
        browser = await playwright.chromium.launch(
            executable_path=path, headless=True, args=list(QUIET), env=environment()
        )
        yield browser
        await browser.close()


@dataclass
class Watched:
    """A window, and what its browser complained of."""

    page: Page
    complaints: list[str] = field(default_factory=list)


@pytest.fixture
def window(chromium: Browser):
    """Call it as `async with window(url) as page`. The page must not make its browser complain, unless `may_complain`.

    A violation of the content-security policy is such a complaint, a script's error, a file that is not there.
    """

    @contextlib.asynccontextmanager
    async def open_window(url: str, *, may_complain: bool = False, **options) -> AsyncIterator[Page]:
        context = await chromium.new_context(**options)
        page = await context.new_page()
        complaints: list[str] = []

        def heard(message: ConsoleMessage) -> None:
            if message.type in ("error", "warning"):
                complaints.append(f"{message.text} ({message.location})")

        page.on("console", heard)
        page.on("pageerror", lambda error: complaints.append(str(error)))
        page.set_default_timeout(10_000)
        try:
            if url:
                await page.goto(url)
            yield page
        finally:
            await context.close()
        assert may_complain or complaints == []

    return open_window
