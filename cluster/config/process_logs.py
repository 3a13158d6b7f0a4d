"""The section `logging`, and how a process of ours logs as it says.

A line is formatted where it is logged, and written by a thread: a disk or a log collector that stalls would stop the
event loop, and with it all streams. Lines that find the thread's queue full, or that can't be written, are dropped and
counted.
"""

import atexit
import contextlib
import io
import logging
import sys
from collections.abc import Mapping
from logging.handlers import QueueHandler, RotatingFileHandler
from pathlib import Path
from queue import Full, Queue
from threading import Thread
from typing import Literal, TextIO

from twostroke.protocol.errors import ConfigError
from twostroke.protocol.requests import Peer
from twostroke.protocol.settings import Section
from twostroke.router.observe.log_format import JsonLines, TextLines

_MAX_BYTES = 64 * 1024 * 1024  # of one file; then another is begun
_OLD_FILES = 4
_MAX_QUEUED = 8192  # lines that wait to be written
_CLOSE_S = 1.0  # for those to be written at the end
_CONTAINERS_OUTPUT = Path("/proc/1/fd/1")
"""Ray keeps what its processes write in files; `kubectl logs` and `docker logs` have what the container's first one
writes."""


class LoggingConfig(Section):
    """Logs of our own processes (docs/observability.md#logs). Ray's and Serve's logs are their own."""

    format: Literal["text", "json"] = "text"
    """Lines for people, or one JSON object a line for programs."""
    level: Literal["debug", "info", "warning", "error"] = "info"
    """The least severe lines that are logged; `info` has a line for each request, of the router and of each worker
    that serves it."""
    to: Literal["files", "stdout"] = "files"
    """stdout: the container's, so that `kubectl logs` and `docker logs` have our lines, each whole; only in containers.
    Else each process has a file in the folder of Serve's logs."""


class _Dropped:
    """Counts the lines of this process that were not written."""

    num_lines = 0


def num_dropped_lines() -> int:
    """Return the log lines that this process has dropped."""
    return _Dropped.num_lines


class _Output(logging.StreamHandler[TextIO]):
    """Common part of the handlers that write. One thread alone calls `emit`, without a lock.

    `is_stalled` lets the end of the process, which flushes and closes all handlers, leave this one alone.
    """

    is_stalled = False

    def flush(self) -> None:
        stream: TextIO | None = self.stream
        if stream is not None and not self.is_stalled:
            stream.flush()

    def close(self) -> None:
        if not self.is_stalled:
            with contextlib.suppress(OSError):  # the disk is full, and takes no last line
                super().close()

    def handleError(self, record: logging.LogRecord) -> None:
        """Count a line that could not be written, as on a disk that is full."""
        _Dropped.num_lines += 1


class _File(_Output, logging.FileHandler):
    """Writes to a file without a buffer, which the end of the process would write when the output may stall."""

    def _open(self) -> io.TextIOWrapper:
        raw = open(self.baseFilename, "ab", buffering=0)  # noqa: SIM115  # the handler closes it
        return io.TextIOWrapper(raw, encoding="utf-8", write_through=True)


class _Rotated(_File, RotatingFileHandler):
    """Formats a line once, where the standard one does so twice, to find out how long it will be: 28 us in place of 48
    (Nov 2026)."""

    def shouldRollover(self, record: logging.LogRecord) -> bool:
        stream: TextIO | None = self.stream
        return stream is not None and stream.tell() >= self.maxBytes


class _Queued(QueueHandler):
    """Formats lines and hands them to a thread, which writes them to `output`."""

    def __init__(self, output: _Output, formatter: logging.Formatter):
        self._lines: Queue[logging.LogRecord | None] = Queue(_MAX_QUEUED)
        super().__init__(self._lines)
        self.setFormatter(formatter)
        self._output = output
        self._writer = Thread(target=self._write, name="log writer", daemon=True)
        self._writer.start()

    def _write(self) -> None:
        while (record := self._lines.get()) is not None:
            self._output.emit(record)

    def enqueue(self, record: logging.LogRecord) -> None:
        """Queue a line, or drop it where too many wait."""
        try:
            self._lines.put_nowait(record)
        except Full:
            _Dropped.num_lines += 1

    def close(self) -> None:
        """Write what is queued, for as long as a stalled output may hold up the process's end."""
        super().close()
        if self._writer.is_alive():
            with contextlib.suppress(Full):
                self._lines.put(None, timeout=_CLOSE_S)
            self._writer.join(_CLOSE_S)
        self._output.is_stalled = self._writer.is_alive()
        self._output.close()


def close_logs() -> None:
    """Write what this process has logged, and log nothing more. Takes two seconds where the output stalls."""
    logger = logging.getLogger("twostroke")
    for handler in logger.handlers:
        handler.close()
    logger.handlers = [logging.NullHandler()]


def log_to(file: Path | None, config: LoggingConfig, process: Mapping[str, str]) -> None:
    """Have this process's packages log to `file` (None: standard error), with what `process` says on JSON lines.

    Where `config` says stdout, that of the container instead. Called again, replaces what was set before. Raises
    ConfigError where there is no container whose output may be written to.
    """
    output: _Output
    if config.to == "stdout":
        try:
            output = _File(_CONTAINERS_OUTPUT)
        except OSError as error:
            raise ConfigError(
                f"logging.to: stdout is that of the container's process 1, which can't be had ({error.strerror}): set "
                "it to files where there is no container, and in one start all as the same user"
            ) from error
    elif file is None:
        output = _Output(sys.stderr)
    else:
        output = _Rotated(file, maxBytes=_MAX_BYTES, backupCount=_OLD_FILES, delay=True)
    close_logs()
    logger = logging.getLogger("twostroke")
    logger.handlers = [_Queued(output, JsonLines(process) if config.format == "json" else TextLines())]
    atexit.unregister(close_logs)
    atexit.register(close_logs)
    logger.propagate = False
    logger.setLevel(config.level.upper())


def log_as_replica(config: LoggingConfig, role: str, peer: Peer) -> None:
    """Have this replica of a Serve deployment log to a file of its own, in the folder of Serve's logs."""
    from ray.serve._private.logging_utils import get_serve_logs_dir  # no public function tells

    folder = Path(get_serve_logs_dir())
    folder.mkdir(parents=True, exist_ok=True)
    process = {"role": role, "worker_id": peer.worker_id, "epoch": f"{peer.epoch:016x}"}
    log_to(folder / f"twostroke_{role}_{peer.worker_id}.log", config, process)
