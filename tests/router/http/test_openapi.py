"""GET /openapi.json: a sound document, true to the paths and to the models that check requests."""

import pytest
from jsonschema import Draft202012Validator

from twostroke.router.http.app import build_app
from twostroke.router.http.openapi import OPERATIONS, document
from twostroke.router.openai.schemas import ChatRequest, CompletionRequest


@pytest.fixture
def told():
    return document(version="1.2", model="fake", has_keys=False)


def test_the_document_has_every_path_that_is_served_and_no_other(told):
    served = {
        (route.path.replace(":path", ""), method.lower())
        for route in build_app().routes
        for method in route.methods
        if method != "HEAD"
    }
    assert served == {(path, method) for path, methods in told["paths"].items() for method in methods}
    assert len(served) == len(OPERATIONS)


def test_every_reference_and_every_schema_is_sound(told):
    def references(value):
        if isinstance(value, dict):
            yield from ([value["$ref"]] if "$ref" in value else [])
            value = list(value.values())
        for one in value if isinstance(value, list) else ():
            yield from references(one)

    schemas = told["components"]["schemas"]
    assert {one.removeprefix("#/components/schemas/") for one in references(told)} <= set(schemas)
    for schema in schemas.values():
        Draft202012Validator.check_schema(schema)


@pytest.mark.parametrize("model", [CompletionRequest, ChatRequest])
def test_every_field_that_a_request_may_have_is_told_and_others_are_refused(told, model):
    schema = told["components"]["schemas"][model.__name__]
    assert set(schema["properties"]) == set(model.model_fields)
    assert schema["additionalProperties"] is False
    assert schema["properties"]["model"] == {"enum": ["fake"]}


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


def test_only_a_server_with_keys_asks_for_them_and_never_to_tell_its_health(told):
    with_keys = document(version="1.2", model="fake", has_keys=True)
    assert "securitySchemes" not in told["components"]
    assert with_keys["components"]["securitySchemes"] == {"key": {"type": "http", "scheme": "bearer"}}
    completions = with_keys["paths"]["/v1/completions"]["post"]
    assert completions["security"] == [{"key": []}]
    assert "401" in completions["responses"]
    assert "401" not in told["paths"]["/v1/completions"]["post"]["responses"]
    assert "security" not in with_keys["paths"]["/health"]["get"]


async def test_the_server_tells_the_document_of_itself(site_of):
    async with site_of(1, 1) as site:
        answer = await site.http.get("/openapi.json")
        assert answer.json() == document(version=site.service.config.version, model="fake", has_keys=False)
        refusal = await site.http.put("/openapi.json")
        assert refusal.status_code == 405
        assert set(refusal.headers["allow"].split(", ")) == {"GET", "HEAD"}
