"""Claude Code with the system prompt and all tools that it sends by itself."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

CLAUDE = Path(__file__).parents[2] / "build" / "clients-npm" / "node_modules" / ".bin" / "claude"
CALL = '[Bash(command="echo 7 > seven")]'
QUIET = {name: "1" for name in ("CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC", "DISABLE_AUTOUPDATER", "DISABLE_TELEMETRY")}


@pytest.fixture
def claude(run: Callable[..., Any]) -> Callable[..., Any]:
    def ask(server: Any, *arguments: str) -> Any:
        reached = {"ANTHROPIC_BASE_URL": server.url, "ANTHROPIC_API_KEY": "unused", "ANTHROPIC_MODEL": server.model}
        return run(CLAUDE, "--print", *arguments, **reached, **QUIET)

    return ask


def test_claude_code_answers(claude: Callable[..., Any], scripted: Callable[[str], Any]) -> None:
    server = scripted(CALL)
    ended = claude(server, "Name the capital of France.")
    assert (ended.returncode, ended.stdout) == (0, "Paris it is.\n")
    assert not server.refused()


def test_claude_code_runs_the_tool_that_the_model_calls(
    claude: Callable[..., Any], scripted: Callable[[str], Any], work: Path
) -> None:
    server = scripted(CALL)
    ended = claude(server, "Write a file, as scripted.", "--allowedTools", "Bash")
    assert (ended.returncode, ended.stdout) == (0, "All done!\n")
    assert (work / "seven").read_text() == "7\n"
    assert not server.refused()


def test_claude_code_knows_that_its_prompt_is_too_long(claude: Callable[..., Any], server: Any) -> None:
    ended = claude(server, "Name the capital of France.")
    assert ended.returncode == 1
    assert "Prompt is too long" in ended.stdout
    assert "limit 8192" in ended.stdout
