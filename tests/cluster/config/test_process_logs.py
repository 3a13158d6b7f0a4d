"""Log lines of our packages reach the file of the process, in the configured format."""

import builtins
import contextlib
import json
import logging
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Literal

import pytest

from twostroke.cluster.config import process_logs
from twostroke.cluster.config.config import read_config
from twostroke.cluster.config.process_logs import LoggingConfig, close_logs, log_to, num_dropped_lines
from twostroke.cluster.config.worker_settings import WorkerSettings
from twostroke.protocol.errors import ConfigError
from twostroke.protocol.requests import LOG_CONTEXT, LogContext
from twostroke.router.observe.log_format import JsonLines


@pytest.fixture(autouse=True)
def _as_before() -> Iterator[None]:
    yield
    close_logs()
    logger = logging.getLogger("twostroke")
    logger.handlers, logger.propagate = [], True
    logger.setLevel(logging.NOTSET)


def test_json_lines_name_their_process(tmp_path: Path) -> None:
    log_to(tmp_path / "log", LoggingConfig(format="json", level="info"), {"worker_id": "w1", "epoch": "07"})
    logging.getLogger("twostroke.decode_worker.scheduler").info("hello")
    logging.getLogger("twostroke.decode_worker.scheduler").debug("too fine")
    logging.getLogger("somebody.else").warning("not ours")
    close_logs()
    (line,) = (json.loads(line) for line in (tmp_path / "log").read_text().splitlines())
    assert (line["worker_id"], line["epoch"], line["level"], line["message"]) == ("w1", "07", "info", "hello")
    assert line["logger"] == "twostroke.decode_worker.scheduler"


def test_what_is_set_again_replaces_what_was_set_before(tmp_path: Path) -> None:
    log_to(tmp_path / "first", LoggingConfig(), {})
    log_to(tmp_path / "second", LoggingConfig(level="warning"), {})
    logging.getLogger("twostroke.router").info("too fine")
    logging.getLogger("twostroke.router").warning("heard")
    close_logs()
    assert not (tmp_path / "first").exists(), "a file is made by its first line"
    assert (tmp_path / "second").read_text().endswith(" WARNING twostroke.router: heard\n")


def test_a_full_file_is_begun_anew_and_each_line_is_formatted_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(process_logs, "_MAX_BYTES", 200)
    formatted: list[str] = []
    format_line = JsonLines.format
    monkeypatch.setattr(
        JsonLines, "format", lambda self, record: formatted.append(record.getMessage()) or format_line(self, record)
    )
    log_to(tmp_path / "log", LoggingConfig(format="json"), {})
    for number in range(9):
        logging.getLogger("twostroke.router").info("line %d", number)
    assert formatted == [f"line {number}" for number in range(9)]
    close_logs()
    files = sorted(tmp_path.iterdir())
    assert [file.name for file in files] == ["log", "log.1", "log.2", "log.3", "log.4"]
    assert all(len(file.read_text(encoding="utf-8").splitlines()) <= 2 for file in files)
    assert "line 8" in files[0].read_text(encoding="utf-8")


def test_a_containers_output_has_json_lines_with_the_requests_id(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    output = tmp_path / "output"
    os.mkfifo(output)
    reading = os.open(output, os.O_RDONLY | os.O_NONBLOCK)
    monkeypatch.setattr(process_logs, "_CONTAINERS_OUTPUT", output)
    log_to(tmp_path / "file", LoggingConfig(format="json", to="stdout"), {"role": "router"})
    token = LOG_CONTEXT.set(LogContext("req-1"))
    logging.getLogger("twostroke.router").info("hello")
    LOG_CONTEXT.reset(token)
    close_logs()
    line = json.loads(os.read(reading, 4096))
    os.close(reading)
    assert (line["message"], line["role"], line["request_id"]) == ("hello", "router", "req-1")
    assert not (tmp_path / "file").exists()


def test_a_collector_that_reads_nothing_holds_up_nobody_and_gets_whole_lines_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    output = tmp_path / "output"
    os.mkfifo(output)
    reading = os.open(output, os.O_RDONLY | os.O_NONBLOCK)
    monkeypatch.setattr(process_logs, "_CONTAINERS_OUTPUT", output)
    monkeypatch.setattr(process_logs, "_MAX_QUEUED", 10)
    monkeypatch.setattr(process_logs, "_CLOSE_S", 0.1)
    log_to(None, LoggingConfig(format="json", to="stdout"), {})
    before, num_lines = num_dropped_lines(), 200
    for number in range(num_lines):  # more than the pipe and the queue hold
        logging.getLogger("twostroke.router").info("%d %s", number, "x" * 1000)
    num_dropped = num_dropped_lines() - before
    assert num_lines > num_dropped > num_lines // 4
    close_logs()  # returns although the writer stands still
    text = b""
    while text.count(b"\n") < num_lines - num_dropped:
        with contextlib.suppress(BlockingIOError):
            text += os.read(reading, 1 << 16)
    os.close(reading)
    assert {json.loads(line)["message"].split()[1] for line in text.splitlines()} == {"x" * 1000}


@pytest.mark.parametrize("to", ["files", "stdout"])
def test_a_full_disk_drops_lines_and_raises_nothing(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], to: Literal["files", "stdout"]
) -> None:
    monkeypatch.setattr(process_logs, "_CONTAINERS_OUTPUT", Path("/dev/full"))
    log_to(Path("/dev/full"), LoggingConfig(to=to), {})
    before = num_dropped_lines()
    for _ in range(3):
        logging.getLogger("twostroke.router").warning("nobody will read this")
    close_logs()
    assert num_dropped_lines() - before == 3
    assert capfd.readouterr().err == "", "standard error may be on the same disk"


def test_a_process_whose_output_stalls_ends(tmp_path: Path) -> None:
    output = tmp_path / "output"
    os.mkfifo(output)
    reading = os.open(output, os.O_RDONLY | os.O_NONBLOCK)
    code = (
        "import logging; from pathlib import Path; from twostroke.cluster.config import process_logs as logs;"
        f"logs._CONTAINERS_OUTPUT = Path({str(output)!r}); logs._CLOSE_S = 0.1;"
        "logs.log_to(None, logs.LoggingConfig(to='stdout'), {});"
        "[logging.getLogger('twostroke').info('x' * 1000) for _ in range(200)]"
    )
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60.0)
    os.close(reading)
    assert (ended.returncode, ended.stderr) == (0, "")


def test_where_there_is_no_container_files_are_the_way_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process_logs, "_CONTAINERS_OUTPUT", tmp_path / "none" / "1")
    with pytest.raises(ConfigError, match=r"^logging.to: .*: set it to files"):
        log_to(None, LoggingConfig(to="stdout"), {})


def test_workers_and_their_ranks_are_told_how_to_log() -> None:
    config = read_config({"logging": {"format": "json", "level": "debug"}})
    assert WorkerSettings.of(config, config.decode).logging == LoggingConfig(format="json", level="debug")


def test_the_loggers_that_the_page_names_are_there() -> None:
    page = (Path(__file__).parents[3] / "docs" / "observability.md").read_text(encoding="utf-8")
    named = set(re.findall(r"logger `([\w.]+)`|\"logger\": \"([\w.]+)\"", page))
    modules = {one or other for one, other in named}
    assert len(modules) >= 2
    assert [name for name in modules if find_spec(name) is None] == []


@pytest.mark.parametrize("form", ["text", "json"])
def test_a_traceback_reads_as_python_writes_it_where_serve_has_replaced_print(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, form: Literal["text", "json"]
) -> None:
    from ray.serve._private.logging_utils import redirected_print

    log_to(tmp_path / "log", LoggingConfig(format=form), {})
    monkeypatch.setattr(builtins, "print", redirected_print)
    try:
        raise ValueError("what was wrong")
    except ValueError:
        logging.getLogger("twostroke.router").exception("it failed")
    close_logs()
    line, *frames = (tmp_path / "log").read_text().splitlines()
    told = json.loads(line)["exception"].splitlines() if form == "json" else [frame[4:] for frame in frames]
    assert told[0] == "Traceback (most recent call last):"
    assert told[-1] == "ValueError: what was wrong"
    assert '    raise ValueError("what was wrong")' in told
