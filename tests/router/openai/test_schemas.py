"""Checks of request fields: refusals, the names in them, and their cost."""

import pytest
from pydantic import ValidationError

from twostroke.router.openai.fields import explain
from twostroke.router.openai.messages import MessagesRequest
from twostroke.router.openai.responses import ResponsesRequest
from twostroke.router.openai.schemas import (
    LACKING,
    MAX_NAMED,
    MAX_TOKEN_IDS,
    WITHOUT_EFFECT,
    ChatRequest,
    CompletionRequest,
    UnknownFields,
)

BASE = {"model": "fake", "prompt": "import os", "max_tokens": 8}
CHAT = {"model": "fake", "messages": [{"role": "user", "content": "hello"}], "max_tokens": 8}


def label_of_change(value):
    return "-".join(value) if isinstance(value, dict) else value.__name__


@pytest.mark.parametrize(
    ("model", "change"),
    [
        (ChatRequest, {"messages": [1] * 2000}),
        (ChatRequest, {"messages": [{"role": "user", "content": [{"a": 1}] * 256}] * 200}),
        (CompletionRequest, {"stop": [1] * 2000}),
        (CompletionRequest, {"stop_token_ids": ["a"] * 2000}),
    ],
    ids=label_of_change,
)
def test_of_many_wrong_items_only_the_first_costs_an_error(model, change):
    with pytest.raises(ValidationError) as caught:
        model.model_validate({**(CHAT if model is ChatRequest else BASE), **change})
    assert caught.value.error_count() <= 5


@pytest.mark.parametrize(
    ("prompt", "refusal"),
    [
        ("", "prompt: string should have at least 1 character"),
        ([], "prompt: list should have at least 1 item after validation, not 0"),
        (["a", ""], "prompt.1: string should have at least 1 character"),
        (["a", "\udfff"], "prompt.1: input should be a valid string, unable to parse raw data as a unicode string"),
        (["a", 1], "prompt.1: must be a string"),
        ([1, 2, True], "prompt.2: must be an integer"),
        ([1, -1], "prompt.1: input should be greater than or equal to 0"),
        ([[1], 2], "prompt.1: must be a list"),
        (5, "prompt: must be a string or a list"),
        ([[1], [1, 2**31]], "prompt.1.1: input should be less than 2147483648"),
        (["a"] * 65, "prompt: list should have at most 64 items after validation, not 65"),
        ([*[1] * MAX_TOKEN_IDS, "a"], f"prompt: list should have at most {MAX_TOKEN_IDS} items"),
    ],
    ids=lambda value: str(value)[:20].encode("unicode_escape").decode(),
)
def test_what_a_prompt_lacks_is_told_where_it_lacks_it(prompt, refusal):
    with pytest.raises(ValidationError) as caught:
        CompletionRequest.model_validate({"prompt": prompt})
    assert str(explain(caught.value.errors(), {"prompt": prompt})).startswith(refusal)


IMAGE_URL = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AA=="}}
IMAGE = {"type": "image", "source": {"type": "url", "url": "https://example.org/a.png"}}
SENDS_IMAGES = [
    (ChatRequest, {"messages": [{"role": "user", "content": [{"type": "text", "text": "a"}, IMAGE_URL]}]}),
    (ChatRequest, {"messages": [{"role": "user", "content": [{"type": "input_audio", "input_audio": {}}]}]}),
    (ResponsesRequest, {"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "a"}]}]}),
    (MessagesRequest, {"messages": [{"role": "user", "content": [IMAGE]}], "max_tokens": 8}),
]


@pytest.mark.parametrize(("model", "body"), SENDS_IMAGES, ids=("chat", "audio", "responses", "messages"))
def test_an_image_is_refused_where_it_stands_with_a_way_to_go_on(model, body):
    with pytest.raises(ValidationError) as caught:
        model.model_validate(body)
    error = explain(caught.value.errors(), body)
    (message,) = body.get("messages") or body["input"]
    part = len(message["content"]) - 1
    kind = message["content"][part]["type"]
    assert error.param.endswith(f".0.content.{part}")
    assert f"the type {kind!r} is not supported" in str(error)
    assert "reads and writes text alone: leave the part out, or say in words what it shows" in str(error)


@pytest.mark.parametrize(
    ("model", "name"),
    [
        (model, name)
        for model in (ChatRequest, CompletionRequest)
        for name in sorted(LACKING.keys() - model.model_fields)
    ],
)
def test_what_would_change_the_answer_and_is_lacking_is_refused_by_name(model, name):
    fields = CHAT if model is ChatRequest else BASE
    why, harmless = LACKING[name]
    for value in (None, *harmless):
        UnknownFields(strict=True).check(model.model_validate({**fields, name: value}))
    body = {**fields, name: {"anything": "else"}}
    with pytest.raises(ValidationError) as caught:
        model.model_validate(body)
    refusal = explain(caught.value.errors(), body)
    assert (refusal.param, str(refusal)) == (name, f"{name}: is not supported: {why}")


@pytest.mark.parametrize("name", sorted(WITHOUT_EFFECT))
def test_what_has_no_effect_is_taken_whatever_it_says(name):
    UnknownFields(strict=True).check(CompletionRequest.model_validate({**BASE, name: ["any", {"thing": 1}]}))


def test_so_many_unknown_fields_are_named_and_no_more(caplog):
    fields = UnknownFields(strict=False)
    for i in range(MAX_NAMED + 10):
        fields.check(CompletionRequest.model_validate({**BASE, f"field_{i}": 1}))
    assert len(caplog.records) == MAX_NAMED
