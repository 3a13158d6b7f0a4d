"""The official client against a live server."""

import openai
import pytest

from tests.e2e.conftest import MODEL, Server

PROMPT = "import os\n\ndef list_files(path):\n"


def test_a_streamed_completion_is_the_one_in_a_piece(server: Server) -> None:
    whole = server.client.completions.create(model=MODEL, prompt=PROMPT, max_tokens=40, temperature=0)
    chunks = list(
        server.client.completions.create(
            model=MODEL,
            prompt=PROMPT,
            max_tokens=40,
            temperature=0,
            stream=True,
            stream_options={"include_usage": True},
        )
    )
    assert "".join(chunk.choices[0].text for chunk in chunks if chunk.choices) == whole.choices[0].text
    assert whole.usage is not None
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens
    assert whole.usage.total_tokens == whole.usage.prompt_tokens + whole.usage.completion_tokens
    assert [chunk.choices[0].finish_reason for chunk in chunks if chunk.choices][-1] == whole.choices[0].finish_reason


def test_a_chat_answers_streamed_and_in_a_piece(server: Server) -> None:
    messages = [{"role": "user", "content": "What does os.path.join do?"}]
    whole = server.client.chat.completions.create(model=MODEL, messages=messages, max_tokens=24, temperature=0)  # type: ignore[arg-type]
    chunks = server.client.chat.completions.create(
        model=MODEL,
        messages=messages,  # type: ignore[arg-type]
        max_tokens=24,
        temperature=0,
        stream=True,
    )
    pieces = [chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices]
    assert whole.choices[0].message.role == "assistant"
    assert "".join(pieces) == whole.choices[0].message.content


def test_two_choices_are_seeded_apart_and_repeat(server: Server) -> None:
    def draw() -> list[str]:
        answer = server.client.completions.create(
            model=MODEL, prompt=PROMPT, max_tokens=24, temperature=1.0, seed=7, n=2
        )
        return [choice.text for choice in sorted(answer.choices, key=lambda choice: choice.index)]

    first = draw()
    assert len(first) == 2
    assert first[0] != first[1]
    assert draw() == first


def test_logprobs_are_told_for_every_token_with_its_alternatives(server: Server) -> None:
    answer = server.client.completions.create(model=MODEL, prompt=PROMPT, max_tokens=6, temperature=0, logprobs=3)
    logprobs = answer.choices[0].logprobs
    assert logprobs is not None
    assert logprobs.token_logprobs is not None
    assert logprobs.top_logprobs is not None
    assert answer.usage is not None
    assert len(logprobs.token_logprobs) == answer.usage.completion_tokens
    for drawn, alternatives in zip(logprobs.token_logprobs, logprobs.top_logprobs, strict=True):
        assert len(alternatives) >= 3
        assert drawn == max(alternatives.values())  # greedy


def test_a_model_that_is_not_served_is_not_found(server: Server) -> None:
    with pytest.raises(openai.NotFoundError) as caught:
        server.client.completions.create(model="another", prompt=PROMPT)
    assert caught.value.param == "model"


@pytest.mark.parametrize(
    ("param", "value"), [("max_tokens", -1), ("temperature", -0.5), ("n", 1_000_000), ("top_p", 7.0)]
)
def test_a_wrong_value_is_refused_by_its_name(server: Server, param: str, value: float) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        server.client.completions.create(model=MODEL, prompt=PROMPT, extra_body={param: value})
    assert caught.value.param == param


def test_a_prompt_longer_than_the_context_is_refused(server: Server) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        server.client.completions.create(model=MODEL, prompt=[400] * 20_000, max_tokens=1)
    assert caught.value.param == "prompt"


def test_the_model_is_listed(server: Server) -> None:
    assert [model.id for model in server.client.models.list()] == [MODEL]
