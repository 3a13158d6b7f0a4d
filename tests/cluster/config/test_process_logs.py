"""Log lines of our packages reach the file of the process, in the configured format."""

import builtins
import json
import logging
import os
import re
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Literal

import pytest

from twostroke.cluster.config import process_logs
from twostroke.cluster.config.config import read_config
from twostroke.cluster.config.process_logs import LoggingConfig, log_to
from twostroke.cluster.config.worker_settings import WorkerSettings
from twostroke.protocol.errors import ConfigError
from twostroke.protocol.log_context import LOG_CONTEXT, LogContext
from twostroke.router.observe.log_format import JsonLines


@pytest.fixture(autouse=True)
def _as_before() -> Iterator[None]:
    yield
    logger = logging.getLogger("twostroke")
    for handler in logger.handlers:
        handler.close()
    logger.handlers, logger.propagate = [], True
    logger.setLevel(logging.NOTSET)


def test_json_lines_name_their_process(tmp_path: Path) -> None:
    log_to(tmp_path / "log", LoggingConfig(format="json", level="info"), {"worker_id": "w1", "epoch": "07"})
    logging.getLogger("twostroke.decode_worker.scheduler").info("hello")
    logging.getLogger("twostroke.decode_worker.scheduler").debug("too fine")
    logging.getLogger("somebody.else").warning("not ours")
    (line,) = (json.loads(line) for line in (tmp_path / "log").read_text().splitlines())
    assert (line["worker_id"], line["epoch"], line["level"], line["message"]) == ("w1", "07", "info", "hello")
    assert line["logger"] == "twostroke.decode_worker.scheduler"


def test_what_is_set_again_replaces_what_was_set_before(tmp_path: Path) -> None:
    log_to(tmp_path / "first", LoggingConfig(), {})
    log_to(tmp_path / "second", LoggingConfig(level="warning"), {})
    logging.getLogger("twostroke.router").info("too fine")
    logging.getLogger("twostroke.router").warning("heard")
    assert not (tmp_path / "first").exists(), "a file is made by its first line"
    assert (tmp_path / "second").read_text().endswith(" WARNING twostroke.router: heard\n")


def test_a_full_file_is_begun_anew_and_each_line_is_formatted_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(process_logs, "_MOST_BYTES", 200)
    formatted: list[str] = []
    format_line = JsonLines.format
    monkeypatch.setattr(
        JsonLines, "format", lambda self, record: formatted.append(record.getMessage()) or format_line(self, record)
    )
    log_to(tmp_path / "log", LoggingConfig(format="json"), {})
    for number in range(9):
        logging.getLogger("twostroke.router").info("line %d", number)
    assert formatted == [f"line {number}" for number in range(9)]
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
    line = json.loads(os.read(reading, 4096))
    os.close(reading)
    assert (line["message"], line["role"], line["request_id"]) == ("hello", "router", "req-1")
    assert not (tmp_path / "file").exists()


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
    line, *frames = (tmp_path / "log").read_text().splitlines()
    told = json.loads(line)["exception"].splitlines() if form == "json" else [frame[4:] for frame in frames]
    assert told[0] == "Traceback (most recent call last):"
    assert told[-1] == "ValueError: what was wrong"
    assert '    raise ValueError("what was wrong")' in told
