"""aider, which edits by plain answers: it sends no tools."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

AIDER = Path(__file__).parents[2] / "build" / "clients-aider" / "bin" / "aider"
# All questions that it would ask a terminal, answered; no search for updates, no telemetry.
ALONE = ("--no-git", "--yes-always", "--no-check-update", "--analytics-disable", "--no-show-model-warnings")


@pytest.fixture
def aider(run: Callable[..., Any], server: Any, work: Path) -> Callable[..., Any]:
    # Prices and contexts, which it would fetch where they are older than a day.
    known = work.parent / ".aider" / "caches" / "model_prices_and_context_window.json"
    known.parent.mkdir(parents=True)
    known.write_text(json.dumps({"openai/gpt-4o": {}}), encoding="utf-8")

    def ask(message: str) -> Any:
        said = work.parent / "message"
        said.write_text(message, encoding="utf-8")
        model = ("--model", f"openai/{server.model}")
        reached = {"OPENAI_API_BASE": f"{server.url}/v1", "OPENAI_API_KEY": "unused"}
        return run(AIDER, *ALONE, *model, "--message-file", said, LITELLM_LOCAL_MODEL_COST_MAP="True", **reached)

    return ask


def test_aider_answers(aider: Callable[..., Any]) -> None:
    ended = aider("Name the capital of France.")
    assert ended.returncode == 0
    assert " received." in ended.stdout
    assert " 0 received." not in ended.stdout
    assert "Error" not in ended.stdout


def test_aider_knows_that_its_prompt_is_too_long(aider: Callable[..., Any]) -> None:
    ended = aider("hi " * 9000)
    assert "has hit a token limit!" in ended.stdout
    assert "possibly exhausted context window" in ended.stdout
