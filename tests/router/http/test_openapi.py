"""GET /openapi.json and /docs: FastAPI's, true to the paths and to the models that check requests."""

import re
from pathlib import Path

import pytest
import pytest_asyncio
from jsonschema import Draft202012Validator

from twostroke.router.http.middleware import OPEN_PATHS
from twostroke.router.http.tenants import KeyConfig, Tenants, new_key
from twostroke.router.openai.schemas import LACKING, WITHOUT_EFFECT, ChatRequest, CompletionRequest

PAGE = Path(__file__).parents[3] / "docs" / "api.md"


@pytest_asyncio.fixture
async def told(site_of):
    async with site_of(1, 1) as site:
        return (await site.http.get("/openapi.json")).json()


def test_the_document_has_every_path_that_the_page_has_and_no_other(told):
    on_page = re.findall(r"`(GET|POST) (/[^`]*)`", PAGE.read_text(encoding="utf-8").split("## ")[0])
    described = {(method.upper(), path) for path, methods in told["paths"].items() for method in methods}
    for_browsers = {("GET", path) for path in ("/openapi.json", "/docs", "/", "/page/{file}", "/events")}
    assert described | for_browsers == set(on_page)


def test_the_paths_of_vllms_that_are_the_same_are_there_and_those_that_are_not_are_told(told):
    text = PAGE.with_name("from-vllm.md").read_text(encoding="utf-8").split("## Paths")[1].split("## ")[0]
    rows = [line.split(" | ") for line in text.splitlines() if line.startswith("| `/")]
    for theirs, ours in rows:
        paths = re.findall("`(/[^`]*)`", theirs)
        assert paths
        assert {path in told["paths"] for path in paths} == {ours == "the same |"}
        assert {path for path in re.findall("`(/[^`]*)`", ours)} <= told["paths"].keys()


def test_the_page_has_every_field_that_is_refused_or_has_no_effect():
    assert [name for name in (*LACKING, *WITHOUT_EFFECT) if f"`{name}`" not in PAGE.read_text(encoding="utf-8")] == []


@pytest.mark.parametrize("model", [CompletionRequest, ChatRequest])
def test_every_field_that_a_request_may_have_is_told_and_others_may_come(told, model):
    schema = told["components"]["schemas"][model.__name__]
    Draft202012Validator.check_schema(schema)
    assert set(schema["properties"]) == set(model.model_fields)
    assert schema["additionalProperties"] is True


def test_what_is_checked_by_hand_is_described_too(told):
    properties = told["components"]["schemas"]["CompletionRequest"]["properties"]
    prompt = Draft202012Validator(properties["prompt"])
    assert all(prompt.is_valid(one) for one in ("a", ["a"], [1, 2], [[1], [2]]))
    assert not any(prompt.is_valid(one) for one in ("", [], [""], [[]], ["a", 1], [-1], [2**31], None, 5, ["a"] * 65))
    stop = Draft202012Validator(properties["stop"])
    assert all(stop.is_valid(one) for one in ("", "a", ["a"], [], None))
    assert not any(stop.is_valid(one) for one in ([""], ["a"] * 17, 5))
    bias = Draft202012Validator(properties["logit_bias"])
    assert bias.is_valid({"5": -100})
    assert not any(bias.is_valid(one) for one in ({"a": 1}, {"5": 101}))
    headers = {one["name"]: one["schema"] for one in told["paths"]["/v1/completions"]["post"]["parameters"]}
    assert set(headers) == {"x-slo-class", "x-slo-ttft-ms", "x-slo-tpot-ms", "x-slo-priority"}
    assert headers["x-slo-ttft-ms"]["maximum"] == 3600000


@pytest.mark.parametrize("has_keys", [True, False])
async def test_what_needs_a_key_says_so_and_health_never_does(site_of, has_keys):
    keys = [KeyConfig(name="alice", sha256=new_key()[1])] if has_keys else []
    async with site_of(0, 1, tenants=Tenants(keys, clock=lambda: 0.0)) as site:
        for path, methods in site.app.openapi()["paths"].items():
            for operation in methods.values():
                assert ("security" in operation) == (has_keys and path not in OPEN_PATHS)


async def test_people_get_a_page_and_other_methods_are_refused(site_of):
    async with site_of(0, 1) as site:
        page = await site.http.get("/docs")
        assert page.headers["content-type"].startswith("text/html")
        assert "/openapi.json" in page.text
        refusal = await site.http.put("/openapi.json")
        assert refusal.status_code == 405
        assert set(refusal.headers["allow"].split(", ")) == {"GET", "HEAD"}
