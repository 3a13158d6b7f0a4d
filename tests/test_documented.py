"""Documented commands that cannot run here are written as their programs take them.

`tests/e2e/test_documented_commands.py` runs those. `tests/rigs/documented.py` tells how a page marks a command.
"""

import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.rigs.documented import PAGES, ROOT, Command, blocks, commands_of, headers, page_commands, read_mark
from twostroke.cluster.cli import parse
from twostroke.cluster.commands.serve import merged_settings

DRY = [command for page in PAGES for command in page_commands(page) if command.dry is not None] + list(headers())
PLACEHOLDER = re.compile(r"\[[^]]*\]|\.\.\.(?=\s|$)")  # [--json], and what a reader fills in


def parts(command: Command) -> Iterator[list[str]]:
    """Yield the words of each program that the line starts, without redirections. Raises ValueError for no shell."""
    text = PLACEHOLDER.sub("", command.text.replace("\\\n", " "))
    lexer = shlex.shlex(text, posix=True, punctuation_chars=";&|<>()")
    lexer.whitespace_split = True
    words: list[str] = []
    for word in lexer:
        if re.fullmatch(r"[;&|<>()]+", word):
            if words:
                yield words
            words = []
        else:
            words.append(word)
    if words:
        yield words


@pytest.mark.parametrize("command", DRY, ids=lambda command: command.place)
def test_a_command_that_cannot_run_here_is_written_as_its_program_takes_it(
    command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checked = subprocess.run(["bash", "-n", "-c", command.text], capture_output=True, text=True)
    assert checked.returncode == 0, checked.stderr
    monkeypatch.chdir(tmp_path)
    for words in parts(command):
        program = words[0].removeprefix(".venv/bin/")
        if program == "twostroke":
            run, arguments = parse(words[1:])
            if run.__module__.endswith(".serve") and arguments.config is None:
                merged_settings(arguments)
        elif program == "make":
            dry = subprocess.run(["make", "-n", "-C", str(ROOT), *words[1:]], capture_output=True, text=True)
            assert dry.returncode == 0, dry.stderr
        elif program == "locust":
            _check_locust(words[1:])
        elif program == "kubectl" and "-k" in words:
            built = subprocess.run(
                [
                    shutil.which("kubectl", path=str(Path(sys.executable).parent)) or "kubectl",
                    "kustomize",
                    ROOT / words[-1],
                ],
                capture_output=True,
                text=True,
            )
            assert built.returncode == 0, built.stderr


def _check_locust(words: list[str]) -> None:
    """Have Locust read its arguments and the files, and list their users."""
    files = words[words.index("-f") + 1]
    words[words.index("-f") + 1] = ",".join(str(ROOT / file) for file in files.split(","))
    listed = subprocess.run(
        [sys.executable, "-m", "locust", *words, "--list"], capture_output=True, text=True, timeout=60
    )
    assert listed.returncode == 0, listed.stdout + listed.stderr


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_a_pages_marks_are_understood_and_say_of_a_command_that_is_there(page: Path) -> None:
    for block in blocks(page):
        texts = [command.text for command in commands_of(block)] or [block.text]
        for text in (*block.mark.dry, *block.mark.smaller):
            assert any(text in one for one in texts), f"{page.name}:{block.line}: {text!r} is in no command"


def test_a_mark_that_says_something_else_is_refused() -> None:
    assert read_mark("dry: it needs a GPU", "page").dry == {"": "it needs a GPU"}
    assert read_mark("dry `b`: hours\nwith `--seconds 120` as `--seconds 3`", "page").smaller == {
        "--seconds 120": "--seconds 3"
    }
    for wrong in ("dry", "dry:", "dry `a`", "skip", "with `a`"):
        with pytest.raises(ValueError, match="does not say"):
            read_mark(wrong, "page")


def test_python_that_stands_as_a_file_compiles() -> None:
    found = [block for page in PAGES for block in blocks(page) if block.language == "python"]
    assert found
    for block in found:
        compile(block.text, f"{block.page}:{block.line}", "exec")
