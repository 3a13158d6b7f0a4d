"""Chat templates are told whether to think, and how much."""

import pytest

from twostroke.router.openai.schemas import ChatRequest

OFF = {"enable_thinking": False, "thinking": False}
ON = {"enable_thinking": True, "thinking": True}


@pytest.mark.parametrize(
    ("fields", "told"),
    [
        ({}, {}),
        ({"reasoning_effort": "none"}, OFF | {"reasoning_effort": "none"}),
        ({"reasoning_effort": "high"}, {"reasoning_effort": "high"}),
        ({"reasoning": {"effort": "low"}}, {"reasoning_effort": "low"}),
        ({"reasoning": {"enabled": False}}, OFF),
        ({"reasoning": {"enabled": True, "effort": "high"}}, ON | {"reasoning_effort": "high"}),
        ({"reasoning": {"effort": "low"}, "reasoning_effort": "high"}, {"reasoning_effort": "high"}),
        ({"chat_template_kwargs": {"enable_thinking": False}}, OFF),
        ({"chat_template_kwargs": {"thinking": True}}, ON),
        (
            {"chat_template_kwargs": {"thinking": True, "enable_thinking": False}},
            {"thinking": True, "enable_thinking": False},
        ),
        ({"reasoning": {"enabled": False}, "chat_template_kwargs": {"enable_thinking": True}}, ON),
    ],
)
def test_templates_are_told_by_either_name_whether_to_think(fields, told):
    body = {"messages": [{"role": "user", "content": "a"}], **fields}
    assert ChatRequest.model_validate(body).template_variables == told
