"""Commands of a Locust user work against the stub server: flags, files, page, workers, shapes and subclasses,
without a plan."""

import csv
import json
import os
import re
import signal
import socket
import subprocess
import sys
import urllib.parse
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest

from tests.cluster.command_line import answering
from tests.loadtests.stub_server import MODEL, VOCABULARY, key_of, stub_server
from tests.rigs.processes import eventually
from twostroke.loadtests.plan import SLO, Constant, Fixed, Plan
from twostroke.loadtests.run_folder import RunFolder
from twostroke.loadtests.workloads.sessions import sessions

ROOT = Path(__file__).parents[2]
LOCUSTFILE = "loadtests/locustfile.py"
ROW = "/v1/chat/completions"
NOBODY = "http://127.0.0.1:9"
LIMIT_S = 60

Rows = dict[tuple[str, str], dict[str, str]]
"""Rows of Locust's statistics, by type and name."""


@contextmanager
def locust(*arguments: object, cwd: Path = ROOT) -> Iterator[subprocess.Popen[str]]:
    """A process of Locust's, which is stopped by its id where it has not ended by then."""
    process = subprocess.Popen(
        [sys.executable, "-m", "locust", *map(str, arguments)],
        cwd=cwd,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    try:
        yield process
    finally:
        if process.poll() is None:
            os.kill(process.pid, signal.SIGTERM)  # SIGINT is ignored by what a script started in the background
        try:
            process.communicate(timeout=LIMIT_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.communicate()
            raise


def run(*arguments: object, cwd: Path = ROOT) -> tuple[int, str]:
    """The exit code, and all that was said."""
    with locust(*arguments, cwd=cwd) as process:
        said, _ = process.communicate(timeout=LIMIT_S)
        return process.returncode, said


def rows_of(path: Path) -> Rows:
    with path.open(newline="") as file:
        return {(row["Type"], row["Name"]): row for row in csv.DictReader(file)}


def count(rows: Rows, kind: str, name: str = ROW) -> int:
    return int(rows[kind, name]["Request Count"])


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def block_of(page: str, word: str) -> str:
    """The Python of a page that has this word in it."""
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / page).read_text(encoding="utf-8"), re.DOTALL)
    return next(block for block in blocks if word in block)


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with stub_server("immediate") as (url, _):
        yield url


def test_the_first_command_that_a_locust_user_types_works(url: str) -> None:
    code, said = run("-f", LOCUSTFILE, *f"--headless -u 1 -r 1 -t 3s --host {url}".split())
    assert code == 0, said
    *_, table, _ = said.split("\nType ")
    for kind in ("POST", "TTFT", "TPOT", "ITL"):
        assert re.search(rf"^{kind} +{ROW} +[1-9]\d* +0\(0\.00%\)", table, re.MULTILINE), said


def test_every_flag_of_the_written_commands_is_there() -> None:
    pages = [ROOT / name for name in ("README.md", "docs/loadtests.md", LOCUSTFILE, "loadtests/stages.py")]
    commands = [line for page in pages for line in re.findall(r"\blocust -f .*", page.read_text(encoding="utf-8"))]
    assert len(commands) > 10
    flags = {flag for command in commands for flag in re.findall(r"(?<=\s)--?[a-z][\w-]*", command)}
    code, known = run("-f", LOCUSTFILE, "--help")
    assert code == 0
    ours = {"--plan", "--folder"}  # Locust's help is told before it reads the file
    assert flags - set(re.findall(r"--?[a-z][\w-]*", known)) == ours


def test_csv_files_and_the_page_of_the_report_have_the_tokens_times_beside_requests(tmp_path: Path) -> None:
    with stub_server("steady") as (url, served):
        files = ("--csv", tmp_path / "run", "--html", tmp_path / "report.html")
        code, said = run("-f", LOCUSTFILE, *f"--headless -u 4 -r 4 -t 3s --max-tokens 20 --host {url}".split(), *files)
    assert code == 0, said
    rows = rows_of(tmp_path / "run_stats.csv")
    assert rows.keys() == {("", "Aggregated"), *((kind, ROW) for kind in ("POST", "TTFT", "TPOT", "ITL"))}
    # The other rows are no requests.
    assert 0 < count(rows, "POST") == count(rows, "", "Aggregated") <= count(rows, "TTFT") <= len(served)
    assert 19 * count(rows, "POST") <= count(rows, "ITL") <= sum(len(each.token_s[1:]) for each in served)
    assert 50 <= float(rows["TTFT", ROW]["Average Response Time"]) <= 5000  # 275 ms, and 20 each, by the stub's script
    assert 10 <= float(rows["TPOT", ROW]["Average Response Time"]) <= 500
    prompts = {each.key for each in served}
    assert len(prompts) == len(served)  # no server has them cached
    report = (tmp_path / "report.html").read_text()
    assert all(f'"method": "{kind}"' in report for kind in ("TTFT", "TPOT", "ITL"))


def test_an_answer_that_the_end_cuts_off_is_no_request_but_has_the_times_that_were_measured(tmp_path: Path) -> None:
    with stub_server("steady") as (url, _):
        users = f"--headless -u 2 -r 2 -t 3s --max-tokens 5000 --host {url} --csv {tmp_path}/run"
        code, said = run("-f", LOCUSTFILE, *users.split())
    assert code == 0, said
    rows = rows_of(tmp_path / "run_stats.csv")
    assert rows.keys() == {("", "Aggregated"), *((kind, ROW) for kind in ("TTFT", "TPOT", "ITL"))}
    assert (count(rows, "", "Aggregated"), count(rows, "TTFT")) == (0, 2)


def test_a_master_adds_up_what_its_workers_send(tmp_path: Path, url: str) -> None:
    port = free_port()
    worker = ("-f", LOCUSTFILE, "--worker", "--master-port", port)
    with locust(*worker) as one, locust(*worker) as other:
        code, said = run(
            *("-f", LOCUSTFILE, "--master", "--master-bind-host", "127.0.0.1", "--master-bind-port", port),
            *f"--headless --expect-workers 2 -u 4 -r 4 -t 3s --host {url} --max-tokens 8 --csv {tmp_path}/run".split(),
        )
        assert (one.wait(LIMIT_S), other.wait(LIMIT_S), code) == (0, 0, 0), said
    assert "Sending spawn jobs of 4 users at 4.00 spawn rate to 2 ready workers" in said
    rows = rows_of(tmp_path / "run_stats.csv")
    assert 0 < count(rows, "POST") == count(rows, "", "Aggregated") <= count(rows, "TTFT")
    assert 7 * count(rows, "POST") <= count(rows, "ITL")


def test_users_follow_a_shape(tmp_path: Path, url: str) -> None:
    shape = (ROOT / "loadtests/stages.py").read_text()
    quick = shape.replace("((60, 10), (120, 50), (180, 10))", "((2, 1), (4, 3))")
    assert quick != shape
    (tmp_path / "stages.py").write_text(quick)
    files = f"{LOCUSTFILE},{tmp_path}/stages.py"
    code, said = run("-f", files, *f"--headless --host {url} --csv {tmp_path}/run --csv-full-history".split())
    assert code == 0, said
    with (tmp_path / "run_stats_history.csv").open(newline="") as file:
        users = [row["User Count"] for row in csv.DictReader(file)]
    assert [number for number in dict.fromkeys(users) if number != "0"] == ["1", "3"]


def test_a_locustfile_of_one_s_own_asks_what_it_likes_however_long_its_imports_take(tmp_path: Path) -> None:
    """The page's example, in the folder where Locust looks for it."""
    slow = "from gevent.monkey import get_original\nget_original('time', 'sleep')(3.5)\n"  # longer than the test
    base_model = (
        "class Writer(LLMUser):\n    @task\n    def go_on(self):\n        self.complete('Once upon', max_tokens=4)\n"
    )
    (tmp_path / "locustfile.py").write_text(slow + block_of("docs/loadtests.md", "LLMUser") + base_model)
    with stub_server("immediate") as (url, served):
        code, said = run(*f"--headless -u 2 -r 2 -t 3s --host {url} --csv {tmp_path}/run".split(), cwd=tmp_path)
    assert code == 0, said
    rows = rows_of(tmp_path / "run_stats.csv")
    assert count(rows, "TTFT", "first question") >= count(rows, "POST", "first question") > 0
    assert count(rows, "POST", "and then") > 0
    assert count(rows, "TPOT", "/v1/completions") >= count(rows, "POST", "/v1/completions") > 0
    assert key_of(["Which", "rivers", "flow", "through", "Paris?"]) in {each.key for each in served}


@pytest.mark.parametrize(
    ("models", "words"),
    [
        (None, f"no server answers at {NOBODY}: Connection refused; is it started?"),
        (b'{"data": []}', "serves no model"),
        (b'{"data": [{"id": "m"}]}', "serves m, not other: give --model"),
    ],
)
def test_a_test_without_a_server_or_its_model_ends_at_once_in_plain_words(models: bytes | None, words: str) -> None:
    with answering({"/v1/models": models or b""}) as answers:
        host = NOBODY if models is None else answers
        code, said = run("-f", LOCUSTFILE, *f"--headless -u 3 -r 3 -t 600s --host {host} --model other".split())
    assert code == 1, said
    assert f"ERROR/twostroke.loadtests.users: {words}" in re.sub(r"http://\S+ serves", "serves", said)
    assert re.search(r"^1 +GET /v1/models: LoadTestError", said, re.MULTILINE)  # once, not by each user
    assert "Traceback" not in said


def test_a_worker_learns_of_its_master_s_plan(tmp_path: Path) -> None:
    port = free_port()
    worker = ("-f", LOCUSTFILE, "--worker", "--master-port", port, "--folder", tmp_path / "out")
    with stub_server("immediate") as (url, served), locust(*worker) as one:
        plan = Plan(url, MODEL, 4096, Constant(10.0), Fixed(8, 4), SLO(), seconds=1.0, vocabulary=VOCABULARY)
        (tmp_path / "plan.json").write_bytes(msgspec.json.encode(plan))
        code, said = run(
            *("-f", LOCUSTFILE, "--master", "--master-bind-host", "127.0.0.1", "--master-bind-port", port),
            *f"--headless --plan {tmp_path}/plan.json --folder {tmp_path}/out".split(),
        )
        assert (one.wait(LIMIT_S), code) == (0, 0), said
    run_folder = RunFolder(tmp_path / "out")
    assert {record.status for record in run_folder.records()} == {"ok"}
    assert len(list(run_folder.records())) == len(served) == len(list(sessions(plan)))
    assert not run_folder.facts().ended_early


def test_a_master_ends_when_its_workers_find_no_server() -> None:
    port = free_port()
    with locust("-f", LOCUSTFILE, "--worker", "--master-port", port) as worker:
        code, said = run(
            *("-f", LOCUSTFILE, "--master", "--master-bind-host", "127.0.0.1", "--master-bind-port", port),
            *f"--headless -u 3 -r 3 -t 600s --host {NOBODY}".split(),
        )
        worker.wait(LIMIT_S)
    assert code == 1, said
    assert f"ERROR/twostroke.loadtests.users: no server answers at {NOBODY}" in said


def test_failed_requests_are_told_and_end_with_locust_s_exit_code() -> None:
    with answering({"/v1/models": b'{"data": [{"id": "m"}]}'}) as url:
        code, said = run("-f", LOCUSTFILE, *f"--headless -u 1 -r 1 -t 3s --host {url}".split())
    assert code == 1, said
    (times,) = re.findall(
        rf"^(\d+) +POST {ROW}: LoadTestError\('500 Internal Server Error: out of order'\)", said, re.MULTILINE
    )
    assert int(times) <= 4  # each user pauses for a second


def test_a_test_that_locust_s_page_starts_finds_the_model_that_was_missing_in_the_one_before() -> None:
    port = free_port()
    page = f"http://127.0.0.1:{port}"

    def asked(path: str, **form: object) -> Any:
        data = urllib.parse.urlencode(form).encode() if form else None
        with urllib.request.urlopen(page + path, data, timeout=LIMIT_S) as answer:
            return json.load(answer)

    def is_up() -> bool:
        with socket.socket() as probe:
            return probe.connect_ex(("127.0.0.1", port)) == 0

    def errors() -> list[str]:
        return [each["error"] for each in asked("/stats/requests")["errors"]]

    bodies = {"/v1/models": b'{"data": []}'}
    with answering(bodies) as host, locust("-f", LOCUSTFILE, "--web-host", "127.0.0.1", "--web-port", port):
        eventually("Locust's page", is_up, LIMIT_S)
        asked("/swarm", user_count=2, spawn_rate=2, host=host, prompt_tokens=8)
        eventually("the end of a test without a model", lambda: asked("/stats/requests")["state"] == "stopped")
        assert errors() == [f"LoadTestError('{host} serves no model: /v1/models is an empty list')"]
        bodies["/v1/models"] = b'{"data": [{"id": "m"}]}'
        asked("/swarm", user_count=2, spawn_rate=2, host=host, prompt_tokens=8)
        eventually("requests", lambda: errors() == ["LoadTestError('500 Internal Server Error: out of order')"])
