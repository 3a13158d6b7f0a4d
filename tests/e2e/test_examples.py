"""Every curl of the pages that tell how to ask, run as it stands there but for the port and the model's name."""

import json
import re
import shlex
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e.conftest import MODEL, Server, serving

ROOT = Path(__file__).parents[2]
PAGES = ["README.md", *(f"docs/{name}.md" for name in ("api", "tools", "structured_output", "clients"))]
HERE = "http://127.0.0.1:8000/"


def examples() -> Iterator[tuple[str, tuple[str, str]]]:
    """(page and line, (command, first line of its answer or what else is there)) of each curl to a server on this
    machine; a command ends with its quotes."""
    for page in PAGES:
        lines = (ROOT / page).read_text(encoding="utf-8").splitlines()
        for number, line in enumerate(lines, 1):
            if not (line.strip().startswith("curl ") and HERE in line):
                continue
            for end in range(number, len(lines) + 1):
                command = "\n".join(lines[number - 1 : end]).strip()
                try:
                    shlex.split(command)
                except ValueError:
                    continue
                if not command.endswith("\\"):
                    break
            yield f"{page}:{number}", (command, lines[end])


EXAMPLES = dict(examples())


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """The bundled model, as if it had been taught to call tools."""
    config = tmp_path_factory.mktemp("examples") / "cluster.yaml"
    config.write_text("model: {response_template: hermes}\n", encoding="utf-8")
    yield from serving("--config", str(config))


def test_every_page_has_examples() -> None:
    assert {place.split(":")[0] for place in EXAMPLES} == {*PAGES}


@pytest.mark.parametrize("place", EXAMPLES)
def test_an_example_is_answered(server: Server, place: str) -> None:
    written, told = EXAMPLES[place]
    command = re.sub(r'"model": "[^"]*"', f'"model": "{MODEL}"', written.replace(HERE, f"{server.url}/"))
    command = command.replace("curl ", "curl -sS -w '\\n%{http_code}' ", 1)
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, timeout=120, check=True)
    answer, _, status = done.stdout.rpartition("\n")
    assert status == "200", answer
    assert answer.strip()
    assert '"error":{' not in answer.replace(" ", "")
    if told.startswith("# {"):
        assert json.loads(answer.splitlines()[0]) == json.loads(told.removeprefix("# "))
