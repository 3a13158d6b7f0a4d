"""The page's files, who may load them, and whose pages may have a browser send requests here."""

import re

import pytest

from twostroke.router.http.page import FOLDER
from twostroke.router.http.tenants import KeyConfig, Tenants, new_key

CHAT = {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 2}
PRIVATE = (
    "127.0.0.1:8000",
    "[::1]:8000",
    "[::1]",
    "localhost",
    "gpu-box:8000",
    "box.local",
    "host.docker.internal",
    "x.default.svc",
)


async def test_the_page_comes_whole_with_a_strict_policy(site_of) -> None:
    async with site_of(1, 1) as site:
        page = await site.http.get("/")
        assert page.headers["content-type"] == "text/html; charset=utf-8"
        linked = re.findall(r'(?:src|href)="(page/[^"]+)"', page.text)
        for path in FOLDER.glob("*.js"):
            linked += [f"page/{name}" for name in re.findall(r'from "\./([^"]+)"', path.read_text(encoding="utf-8"))]
        assert {path.name for path in FOLDER.iterdir()} == {
            "index.html",
            *(name.removeprefix("page/") for name in linked),
        }
        for path in ("", *linked):
            answer = await site.http.get(f"/{path}")
            assert answer.status_code == 200
            policy = answer.headers["content-security-policy"]
            assert policy.startswith("default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; ")
            assert "unsafe" not in policy
            assert answer.headers["x-content-type-options"] == "nosniff"
            assert answer.headers["referrer-policy"] == "no-referrer"
            again = await site.http.get(f"/{path}", headers={"if-none-match": answer.headers["etag"]})
            assert (again.status_code, again.content) == (304, b"")
            assert (await site.http.head(f"/{path}")).status_code == 200


def test_the_page_names_no_other_site() -> None:
    for path in FOLDER.iterdir():
        text = path.read_text(encoding="utf-8").replace("http://www.w3.org/2000/svg", "")
        foreign = re.search(r"https?://|@import|\burl\(|innerHTML|outerHTML|insertAdjacentHTML|eval\(", text)
        assert not foreign, path.name


@pytest.mark.parametrize("path", ["/page/../app.py", "/page/%2e%2e/app.py", "/page/none.js", "/page/", "/page"])
async def test_nothing_else_is_served_as_a_file(path: str, site_of) -> None:
    async with site_of(1, 1) as site:
        assert (await site.http.get(path)).status_code in (307, 404)


async def test_a_server_without_a_page_has_none(site_of) -> None:
    async with site_of(1, 1, page=False) as site:
        for path in ("/", "/page/app.js"):
            assert (await site.http.get(path)).status_code == 404
        assert (await site.http.get("/version")).status_code == 200


@pytest.mark.parametrize(
    "headers",
    [
        {"origin": "https://evil.example"},
        {"origin": "null"},
        {"origin": "http://router:8001"},
        {"origin": "http://localhost", "sec-fetch-site": "same-site"},
        {"sec-fetch-site": "cross-site", "sec-fetch-dest": "image"},
        {"sec-fetch-site": "same-site", "sec-fetch-dest": "script"},
        {"sec-fetch-site": "cross-site", "sec-fetch-dest": "iframe"},
    ],
)
async def test_another_sites_page_gets_nothing(headers: dict[str, str], site_of) -> None:
    async with site_of(1, 1) as site:
        for method, path, body in (
            ("POST", "/v1/chat/completions", CHAT),
            ("GET", "/events", None),
            ("GET", "/", None),
        ):
            answer = await site.http.request(method, path, json=body, headers={"content-type": "text/plain"} | headers)
            assert answer.status_code == 403
            assert answer.json()["error"]["code"] == "cross_origin"
            assert not [name for name in answer.headers if name.startswith("access-control")]
        assert not site.rig["d0"].seen


@pytest.mark.parametrize(
    "headers",
    [
        {},
        {"origin": "http://router"},
        {"origin": "https://router", "sec-fetch-site": "same-origin"},  # what ends TLS in front says http here
        {"sec-fetch-site": "cross-site", "sec-fetch-dest": "document"},  # somebody followed a link
        {"sec-fetch-site": "none"},
    ],
)
async def test_our_own_page_and_whoever_is_no_browser_are_served(headers: dict[str, str], site_of, until) -> None:
    async with site_of(1, 1) as site:
        await until(lambda: not site.service.missing())
        answer = await site.http.post("/v1/chat/completions", json=CHAT, headers=headers)
        assert answer.status_code == 200
        assert not [name for name in answer.headers if name.startswith("access-control")]


async def test_an_origin_that_is_allowed_is_served_and_told_so(site_of, until) -> None:
    async with site_of(1, 1, cors_origins=("https://chat.example",)) as site:
        await until(lambda: not site.service.missing())
        asks = {"access-control-request-method": "POST", "access-control-request-headers": "authorization,content-type"}
        before = await site.http.options("/v1/chat/completions", headers={"origin": "https://chat.example", **asks})
        assert before.status_code == 200
        answer = await site.http.post("/v1/chat/completions", json=CHAT, headers={"origin": "https://chat.example"})
        assert answer.headers["access-control-allow-origin"] == "https://chat.example"
        other = await site.http.post("/v1/chat/completions", json=CHAT, headers={"origin": "https://evil.example"})
        assert other.status_code == 403
        assert "access-control-allow-origin" not in other.headers


async def test_a_public_name_that_leads_here_is_not_ours_where_no_key_is_asked_for(site_of) -> None:
    """Wherever the server listens: a page in somebody's browser reaches what he reaches."""
    async with site_of(1, 1, hosts=("llm.example",), cors_origins=("https://chat.example:444",)) as site:
        for host in (*PRIVATE, "chat.example", "llm.example", "LLM.example:8000", "llm.example."):
            assert (await site.http.get("/version", headers={"host": host})).status_code == 200, host
        for host in (
            "evil.example",
            "evil.example:8000",
            "127.0.0.1.evil.example",
            "x.localhost.evil.example",
            "EVIL.example.",
        ):
            origin = {"origin": f"http://{host}"}
            for headers in ({"host": host}, {"host": host, **origin}):
                refused = await site.http.get("/version", headers=headers)
                assert refused.status_code == 403, host
                assert "router.hosts" in refused.json()["error"]["message"]
                assert (await site.http.post("/v1/completions", json=CHAT, headers=headers)).status_code == 403
            assert (await site.http.get("/health", headers={"host": host})).status_code == 200  # a balancer's
        assert not site.rig["d0"].seen


@pytest.mark.parametrize("setting", [{"hosts": ("*",)}, {"cors_origins": ("*",)}])
async def test_any_name_is_ours_where_it_is_said(setting: dict[str, tuple[str, ...]], site_of) -> None:
    async with site_of(1, 1, **setting) as site:
        assert (await site.http.get("/version", headers={"host": "evil.example"})).status_code == 200


async def test_with_keys_any_name_is_ours_and_pages_of_others_get_nothing_all_the_same(site_of) -> None:
    """A page that somebody's browser was led here by has no key."""
    key, sha256 = new_key()
    tenants = Tenants([KeyConfig(name="a", sha256=sha256)], clock=lambda: 0.0)
    async with site_of(1, 1, tenants=tenants) as site:
        fields = {"host": "llm.example", "authorization": f"Bearer {key}"}
        assert (await site.http.get("/version", headers=fields)).status_code == 200
        assert (await site.http.get("/version", headers={"host": "evil.example"})).status_code == 401
        fields["origin"] = "https://evil.example"
        assert (await site.http.get("/version", headers=fields)).status_code == 403
