"""Codex with the instructions and all tools that it sends by itself."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

CODEX = Path(__file__).parents[2] / "build" / "clients-npm" / "node_modules" / ".bin" / "codex"
CALL = "[exec_command(cmd='echo 8 >eight')]"


@pytest.fixture
def codex(run: Callable[..., Any], work: Path) -> Callable[..., Any]:
    def ask(server: Any, *arguments: str) -> Any:
        provider = {"name": "twostroke", "base_url": f"{server.url}/v1", "wire_api": "responses", "env_key": "KEY"}
        lines = [f"{name} = {json.dumps(value)}" for name, value in provider.items()]
        settings = [
            f"model = {json.dumps(server.model)}",
            'model_provider = "twostroke"',
            "check_for_update_on_startup = false",
            "[analytics]",
            "enabled = false",
            "[model_providers.twostroke]",
            *lines,
        ]
        folder = work.parent / ".codex"
        folder.mkdir()
        (folder / "config.toml").write_text("\n".join(settings), encoding="utf-8")
        return run(CODEX, "exec", "--skip-git-repo-check", *arguments, KEY="unused")

    return ask


def test_codex_answers(codex: Callable[..., Any], scripted: Callable[[str], Any]) -> None:
    server = scripted(CALL)
    ended = codex(server, "Name the capital of France.")
    assert (ended.returncode, ended.stdout) == (0, "Paris it is.\n")
    assert not server.refused()


def test_codex_runs_the_tool_that_the_model_calls(
    codex: Callable[..., Any], scripted: Callable[[str], Any], work: Path
) -> None:
    server = scripted(CALL)
    # Its sandbox can't be made where the tests run in a container.
    ended = codex(server, "Write a file, as scripted.", "--dangerously-bypass-approvals-and-sandbox")
    assert (ended.returncode, ended.stdout) == (0, "All done!\n")
    assert (work / "eight").read_text() == "8\n"
    assert not server.refused()


def test_codex_knows_that_its_prompt_is_too_long(codex: Callable[..., Any], server: Any) -> None:
    ended = codex(server, "Name the capital of France.")
    assert ended.returncode == 1
    assert "ran out of room in the model's context window" in ended.stderr
