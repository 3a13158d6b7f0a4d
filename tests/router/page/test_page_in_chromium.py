"""The page, as a person uses it: in a real browser, over real HTTP, with workers that are fakes."""

import asyncio

import pytest
from playwright.async_api import expect

pytestmark = pytest.mark.asyncio(loop_scope="session")


async def ask(page, text="hello"):
    await page.get_by_label("Message", exact=True).fill(text)
    await page.keyboard.press("Enter")


async def test_what_is_typed_is_answered_as_it_streams(site_of, window):
    async with site_of(1, 1, listen=True) as site:
        gate = site.rig["d0"].gate = asyncio.Semaphore(5)
        async with window(site.url) as page:
            await expect(page.locator("#model")).to_have_text("fake")
            await ask(page)
            answer = page.locator("article.assistant .text")
            await expect(answer).not_to_have_text("")
            before = await answer.text_content()
            for _ in range(500):
                gate.release()
            await expect(page.get_by_role("button", name="Regenerate")).to_be_visible()
            after = await answer.text_content()
            assert len(after) > len(before)
            await expect(page.locator("#feed")).to_have_text("live")
