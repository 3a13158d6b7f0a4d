"""openai-agents, by either API that it speaks."""

from collections.abc import Callable
from typing import Any, Literal

import pytest
from agents import (
    Agent,
    ModelSettings,
    OpenAIChatCompletionsModel,
    OpenAIResponsesModel,
    Runner,
    function_tool,
    set_tracing_disabled,
)
from openai import AsyncOpenAI

set_tracing_disabled(True)  # traces would go to OpenAI

BY_EITHER_API = pytest.mark.parametrize("api", [OpenAIResponsesModel, OpenAIChatCompletionsModel])
CALL = "[exec_command(cmd='echo 8 >eight')]"  # as in test_codex.py: one server for both
QUESTION = "What is the weather in Oslo?"


def reached(api: type[Any], server: Any) -> Any:
    client = AsyncOpenAI(base_url=f"{server.url}/v1", api_key="unused", max_retries=0, timeout=120)
    return api(model=server.model, openai_client=client)


@BY_EITHER_API
def test_an_agent_answers(api: type[Any], scripted: Callable[[str], Any]) -> None:
    agent = Agent(name="geographer", instructions="Be brief.", model=reached(api, scripted(CALL)))
    assert Runner.run_sync(agent, "Name the capital of France.").final_output == "Paris it is."


@BY_EITHER_API
def test_an_agent_runs_the_tool_that_it_must_call(api: type[Any], server: Any) -> None:
    asked: list[str] = []

    @function_tool
    def get_weather(city: Literal["Paris", "Oslo"]) -> str:
        """Tell the weather of a city."""
        asked.append(city)
        return "21 degrees"

    agent = Agent(
        name="forecaster",
        model=reached(api, server),
        tools=[get_weather],
        model_settings=ModelSettings(tool_choice="required", temperature=0, parallel_tool_calls=False),
        tool_use_behavior="stop_on_first_tool",
    )
    assert Runner.run_sync(agent, QUESTION).final_output == "21 degrees"
    assert len(asked) == 1
    assert asked[0] in ("Paris", "Oslo")


@BY_EITHER_API
def test_an_agent_goes_on_with_the_result_of_a_call(api: type[Any], scripted: Callable[[str], Any]) -> None:
    ran: list[str] = []

    @function_tool
    def exec_command(cmd: str) -> str:
        """Run a command."""
        ran.append(cmd)
        return "it went well"

    agent = Agent(name="typist", model=reached(api, scripted(CALL)), tools=[exec_command])
    assert Runner.run_sync(agent, "Write a file, as scripted.").final_output == "All done!"
    assert ran == ["echo 8 >eight"]
