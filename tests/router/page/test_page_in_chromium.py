"""The page, as a person uses it: in a real browser, over real HTTP, with workers that are fakes."""

import asyncio
import contextlib
import json
import re
from itertools import pairwise

import pytest
from playwright.async_api import Page, expect

from twostroke.protocol.stats import TierStats
from twostroke.router.http.tenants import KeyConfig, Tenants, new_key

pytestmark = pytest.mark.asyncio(loop_scope="session")

PHONE = {"viewport": {"width": 375, "height": 720}}


async def ask(page: Page, text: str = "hello") -> None:
    await page.get_by_label("Message", exact=True).fill(text)
    await page.keyboard.press("Enter")


def answered(page: Page):
    return page.get_by_role("button", name="Regenerate")


def sent_events(*deltas: dict, finish: str = "stop") -> dict:
    """An answer as the server would stream it, for what no fake model says."""
    chunks = [{"choices": [{"index": 0, "delta": delta, "finish_reason": None}]} for delta in deltas]
    chunks.append({"choices": [{"index": 0, "delta": {}, "finish_reason": finish}]})
    body = "".join(f"data: {json.dumps(chunk)}\n\n" for chunk in chunks) + "data: [DONE]\n\n"
    return {"status": 200, "content_type": "text/event-stream", "body": body}


@contextlib.asynccontextmanager
async def answering(page: Page, *answers: dict):
    """The page's chats are answered with these, one after the other; yields the bodies of its requests."""
    bodies: list[dict] = []

    async def answer(route) -> None:
        bodies.append(route.request.post_data_json)
        await route.fulfill(**answers[min(len(bodies), len(answers)) - 1])

    await page.route("**/v1/chat/completions", answer)
    yield bodies


async def test_what_is_typed_is_answered_as_it_streams_and_seen_on_its_way(site_of, window):
    async with site_of(1, 1, listen=True) as site:
        gate = site.rig["d0"].gate = asyncio.Semaphore(5)
        async with window(site.url) as page:
            await expect(page.locator("#model")).to_have_text("fake")
            await ask(page)
            answer = page.locator("article.assistant .text")
            await expect(answer).not_to_have_text("")
            before = await answer.text_content()
            for _ in range(600):
                gate.release()
            await expect(answered(page)).to_be_visible()
            assert len(await answer.text_content()) > len(before)
            await expect(page.locator("#feed")).to_have_text("live")
            await page.get_by_role("button", name="Table").click()
            await expect(page.locator("#requests td").first).to_have_text("#1")
            await expect(page.locator("#workers")).to_contain_text("prefill p0")


async def test_an_answer_is_stopped_at_the_server_too_and_asked_for_anew(site_of, window, until):
    async with site_of(1, 1, listen=True) as site:
        gate = site.rig["d0"].gate = asyncio.Semaphore(4)
        async with window(site.url) as page:
            await ask(page)
            await expect(page.locator("article.assistant .text")).not_to_have_text("")
            await page.get_by_role("button", name="Stop").click()
            await expect(page.locator("article.assistant footer")).to_contain_text("stopped")
            await until(lambda: not site.rig.fleet.owned)
            for _ in range(600):
                gate.release()
            await answered(page).click()
            await expect(page.locator("article.assistant footer")).to_contain_text("tokens")
            assert await page.locator("article").count() == 2
            assert site.rig["d0"].seen[-1].num_prompt_tokens == site.rig["d0"].seen[0].num_prompt_tokens


async def test_a_message_may_be_sent_before_the_model_is_known(site_of, window):
    async with site_of(1, 1, listen=True) as site, window(site.url) as page:
        may_be_known = asyncio.Event()

        async def hold(route) -> None:
            await may_be_known.wait()
            await route.continue_()

        await page.route("**/v1/models", hold)
        await page.reload()
        await ask(page)
        await expect(answered(page)).to_be_visible()
        may_be_known.set()
        await expect(page.locator("#model")).to_have_text("fake")


async def test_everything_works_by_keyboard(site_of, window, until):
    async with site_of(1, 1, listen=True) as site:
        site.rig["d0"].gate = asyncio.Semaphore(4)
        async with window(site.url) as page:
            await expect(page.get_by_label("Message", exact=True)).to_be_focused()
            await page.keyboard.type("one")
            await page.keyboard.press("Shift+Enter")
            await page.keyboard.type("two")
            await page.keyboard.press("Enter")
            await expect(page.locator("article.user .text")).to_have_text("one\ntwo")
            await expect(page.locator("article.assistant .text")).not_to_have_text("")
            await page.keyboard.press("Escape")
            await expect(page.locator("article.assistant footer")).to_contain_text("stopped")
            await page.locator("#view").press("Enter")
            await expect(page.locator("#requests td").first).to_have_text("#1")
            await page.locator("#view").press("Enter")
            await page.locator("#lanes").focus()
            await page.keyboard.press("ArrowDown")
            await expect(page.locator("#detail")).to_contain_text("Blocks")
            await page.keyboard.press("ArrowUp")
            await expect(page.locator("#detail")).to_contain_text("TTFT")
            reached = set()
            await page.locator("#new").focus()
            for _ in range(40):
                reached.add(await page.evaluate("document.activeElement.id"))
                await page.keyboard.press("Tab")
            assert {"log", "prompt", "tune", "curl", "send", "span", "view", "lanes", "theme"} <= reached


async def test_what_the_server_refuses_is_shown_with_a_way_to_try_again(site_of, window):
    async with site_of(1, 1, listen=True) as site, window(site.url, may_complain=True) as page:
        async with answering(
            page, {"status": 429, "json": {"error": {"message": "too much now", "code": "overloaded"}}}
        ):
            await ask(page)
            await expect(page.locator("#problem")).to_contain_text("too much now")
        await page.unroute("**/v1/chat/completions")
        await page.get_by_role("button", name="Try again").click()
        await expect(answered(page)).to_be_visible()
        await expect(page.locator("#problem")).to_be_hidden()


async def test_settings_system_prompt_and_schema_are_sent_and_a_broken_schema_is_not(site_of, window):
    async with site_of(1, 1, listen=True) as site, window(site.url) as page:
        async with answering(page, sent_events({"content": "{}"})) as bodies:
            await page.get_by_role("button", name="Settings").click()
            for label, value in (
                ("Temperature", "0.5"),
                ("Seed", "7"),
                ("Max tokens", "9"),
                ("System prompt", "Be brief"),
            ):
                await page.get_by_label(label).fill(value)
            schema = page.get_by_label("JSON schema of the answer")
            await schema.fill('{"type": ')
            await ask(page)
            await expect(page.locator("#schema-problem")).to_contain_text("no JSON")
            assert bodies == []
            await schema.fill('{"type": "object"}')
            await ask(page)
            await expect(answered(page)).to_be_visible()
        (body,) = bodies
        assert (body["temperature"], body["seed"], body["max_completion_tokens"]) == (0.5, 7, 9)
        assert [one["content"] for one in body["messages"]] == ["Be brief", "hello"]
        assert body["response_format"]["json_schema"] == {
            "name": "answer",
            "strict": True,
            "schema": {"type": "object"},
        }


async def test_tools_run_in_the_page_and_their_results_go_back(site_of, window):
    call = {"index": 0, "id": "c1", "type": "function", "function": {"name": "calculator", "arguments": ""}}
    parts = [{"index": 0, "function": {"arguments": text}} for text in ('{"expression": "2*(3+4)', '^2 - 6/4"}')]
    called = sent_events({"tool_calls": [call]}, *({"tool_calls": [part]} for part in parts), finish="tool_calls")
    async with site_of(1, 1, listen=True) as site, window(site.url) as page:
        async with answering(page, called, sent_events({"reasoning_content": "Easy."}, {"content": "96.5"})) as bodies:
            await page.get_by_role("button", name="Settings").click()
            await page.get_by_label("calculator").check()
            await ask(page, "how much?")
            await expect(answered(page)).to_be_visible()
        assert [one["function"]["name"] for one in bodies[0]["tools"]] == ["calculator"]
        asked, told = bodies[1]["messages"][1:]
        assert asked["tool_calls"][0]["function"]["arguments"] == '{"expression": "2*(3+4)^2 - 6/4"}'
        assert told == {"role": "tool", "tool_call_id": "c1", "content": "96.5"}
        await expect(page.locator(".calls")).to_contain_text("calculator")
        thoughts = page.locator("details.thoughts")
        assert not await thoughts.get_attribute("open")
        await thoughts.click()
        await expect(thoughts).to_contain_text("Easy.")


async def test_an_answer_is_text_whatever_is_in_it(site_of, window):
    text = (
        '<img src=x onerror="document.title=1"> **bold** `<b>`\n\n'
        "```js\n<script>alert(1)</script>\n```\n- [a](javascript:alert(1))"
    )
    async with site_of(1, 1, listen=True) as site, window(site.url) as page:
        async with answering(page, sent_events({"content": text})):
            await ask(page, "<i>x</i>")
            await expect(answered(page)).to_be_visible()
        assert await page.locator("#log img, #log script, #log a, #log i, #log b").count() == 0
        await expect(page.locator("#log strong")).to_have_text("bold")
        await expect(page.locator("#log pre")).to_have_text("<script>alert(1)</script>")
        assert await page.title() == "Twostroke"


async def test_the_request_is_copied_as_a_command_without_the_key(site_of, window):
    allowed = ["clipboard-read", "clipboard-write"]
    async with site_of(1, 1, listen=True) as site, window(site.url, permissions=allowed) as page:
        await expect(page.locator("#model")).to_have_text("fake")
        await page.get_by_label("Message", exact=True).fill("it's")
        await page.get_by_role("button", name="Copy as curl").click()
        await expect(page.get_by_role("button", name="Copied")).to_be_visible()
        told = await page.evaluate("navigator.clipboard.readText()")
    assert told.startswith(f"curl -N {site.url}/v1/chat/completions")
    shell = await asyncio.create_subprocess_shell(
        told.replace("curl", "printf '%s\\n'", 1), stdout=asyncio.subprocess.PIPE
    )
    words, _ = await shell.communicate()
    body = json.loads(words.decode().partition("-d\n")[2])
    assert body["messages"] == [{"role": "user", "content": "it's"}]


async def test_a_key_is_asked_for_kept_in_the_tab_and_sent(site_of, window):
    key, digest = new_key()
    tenants = Tenants([KeyConfig(name="ann", sha256=digest)], clock=lambda: 0.0)
    async with site_of(1, 1, listen=True, tenants=tenants) as site, window(site.url, may_complain=True) as page:
        for given in ("wrong", key):
            await page.get_by_label("Key", exact=True).fill(given)
            await page.keyboard.press("Enter")
            if given != key:
                await expect(page.locator("#key-problem")).to_contain_text("not known")
        await expect(page.locator("#model")).to_have_text("fake")
        await expect(page.locator("#feed")).to_have_text("live, your requests")
        await ask(page)
        await expect(answered(page)).to_be_visible()
        assert await page.evaluate("[sessionStorage.length, JSON.stringify(localStorage), document.cookie]") == [
            1, '{"twostroke.theme":"auto"}', ""
        ]  # fmt: skip


@pytest.mark.parametrize("scheme", ["light", "dark"])
async def test_light_and_dark_follow_the_system_and_the_switch_and_text_has_contrast(scheme, site_of, window):
    contrast = """() => {
      const light = (css) => { const c = css.match(/[\\d.]+/g).slice(0, 3).map((v) => v / 255).map((v) =>
        v <= 0.03928 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4); return 0.2126*c[0] + 0.7152*c[1] + 0.0722*c[2]; };
      const card = light(getComputedStyle(document.getElementById('talk')).backgroundColor);
      return ['h2', '.feed', '.hint', '#empty', '.legend li'].map((one) => {
        const [a, b] = [light(getComputedStyle(document.querySelector(one)).color), card].sort((a, b) => b - a);
        return (a + 0.05) / (b + 0.05); }); }"""
    background = "getComputedStyle(document.body).backgroundColor"
    async with site_of(1, 1, listen=True) as site, window(site.url, color_scheme=scheme) as page:
        first = await page.evaluate(background)
        assert min(await page.evaluate(contrast)) >= 4.5
        theme = page.locator("#theme")
        other = "dark" if scheme == "light" else "light"
        while other not in await theme.text_content():
            await theme.click()
        assert await page.evaluate(background) != first
        assert min(await page.evaluate(contrast)) >= 4.5


async def test_a_phone_shows_all_of_it_without_scrolling_sideways(site_of, window):
    async with site_of(1, 1, listen=True) as site, window(site.url, **PHONE) as page:
        async with answering(page, sent_events({"content": "word" * 90 + "\n```\n" + "code " * 90 + "\n```"})):
            await ask(page, "x" * 300)
            await expect(answered(page)).to_be_visible()
        await page.get_by_role("button", name="Settings").click()
        for view in ("lanes", "table"):
            assert await page.evaluate("document.documentElement.scrollWidth") <= 375, view
            await page.get_by_role("button", name="Table").click()


DRAWN = """
window.drawn = [];
const clearRect = CanvasRenderingContext2D.prototype.clearRect;
CanvasRenderingContext2D.prototype.clearRect = function (...all) {
  window.drawn = [];
  return clearRect.apply(this, all);
};
const fillText = CanvasRenderingContext2D.prototype.fillText;
CanvasRenderingContext2D.prototype.fillText = function (text, x, y) {
  window.drawn.push({text, x, y, width: this.measureText(text).width});
  return fillText.call(this, text, x, y);
};
"""
"""Keeps what was written on the canvas since it was cleared."""


async def test_a_phones_picture_can_be_read(site_of, window):
    async with site_of(1, 1, listen=True) as site, window(site.url, **PHONE) as page:
        await page.add_init_script(DRAWN)
        await page.reload()
        await ask(page, "hello")
        await expect(answered(page)).to_be_visible()
        for span in await page.locator("#span option").evaluate_all("(all) => all.map((one) => one.value)"):
            await page.locator("#span").select_option(span)
            await page.evaluate("new Promise((drawn) => requestAnimationFrame(() => requestAnimationFrame(drawn)))")
            drawn = await page.evaluate("window.drawn")
            labels = [one for one in drawn if re.fullmatch("now|\N{MINUS SIGN}[0-9]+ s", one["text"])]
            places = sorted({(one["x"], one["width"]) for one in labels})
            assert all(a + of_a / 2 < b - of_b / 2 for (a, of_a), (b, of_b) in pairwise(places)), span
        texts = {one["text"] for one in drawn}
        assert {"0 run, 0 wait", "P p0", "D d0"} <= texts
        assert any("\N{RIGHTWARDS ARROW}" in text for text in texts)  # the lane's title


async def test_a_worker_that_dies_and_comes_back_is_seen(site_of, window):
    async with site_of(1, 2, listen=True) as site, window(site.url) as page:
        await page.get_by_role("button", name="Table").click()
        of_d1 = page.locator("#workers tr", has_text="decode d1")
        await expect(of_d1).to_contain_text("there")
        await site.rig["d1"].die()
        await expect(of_d1).to_contain_text("gone")
        await site.rig["d1"].start()
        await expect(of_d1).to_have_count(2)
        await expect(of_d1.last).to_contain_text("there")


async def test_tiers_are_shown_where_some_worker_has_any(site_of, window):
    async with site_of(1, 1, listen=True) as site, window(site.url) as page:
        await page.get_by_role("button", name="Table").click()
        of_d0, of_p0 = (page.locator("#workers tr", has_text=name) for name in ("decode d0", "prefill p0"))
        await expect(of_d0).to_contain_text("there")
        await expect(page.locator("#workers")).not_to_contain_text("KV tiers")
        disk = TierStats("disk", lookups=8, hits=6, num_bytes=3 * 2**29, max_bytes=2**32)
        site.rig["d0"].tell(tiers=(TierStats("host"), disk))
        await expect(page.locator("#workers")).to_contain_text("KV tiers")
        await expect(of_d0).to_contain_text("host: not asked yet; disk: 1.5 GiB of 4.0 GiB, 75 % of 8 found")
        await expect(of_p0).to_contain_text("none")


async def test_a_hostile_page_gets_nothing(site_of, window):
    """Another port of this host is another origin, and the same site: what may still be sent, arrives."""
    attacks = """async (url) => {
      const chat = JSON.stringify({messages: [{role: 'user', content: 'x'}], max_tokens: 2});
      const told = [];
      for (const [path, options] of [['/v1/models', {}], ['/status', {}], ['/events', {}],
          ['/v1/chat/completions', {method: 'POST', body: chat, headers: {'content-type': 'application/json'}}],
          ['/v1/chat/completions', {method: 'POST', body: chat}]]) {
        try { told.push((await fetch(url + path, options)).status) } catch (error) { told.push('nothing') }
        const blind = {...options, mode: 'no-cors'};
        try { told.push((await fetch(url + path, blind)).status || 'opaque') }
        catch (error) { told.push('nothing') }
      }
      const frame = document.createElement('iframe'); frame.src = url + '/';
      const loaded = new Promise((done) => { frame.onload = done }); document.body.append(frame); await loaded;
      try { told.push(frame.contentDocument ? 'read' : 'nothing') } catch (error) { told.push('nothing') }
      return told; }"""
    async with site_of(1, 1, listen=True) as site, site_of(1, 1, listen=True) as evil:
        async with window(f"{evil.url}/version", may_complain=True) as page:
            told = await page.evaluate(attacks, site.url)
        assert set(told) <= {"nothing", "opaque"}
        assert site.service.pipeline.in_flight == 0
        assert not site.rig["p0"].seen
        assert not site.rig["d0"].seen
