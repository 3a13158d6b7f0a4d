"""The section `logging`, and how a process of ours logs as it says."""

import logging
import sys
from collections.abc import Mapping
from logging.handlers import RotatingFileHandler
from pathlib import Path
from typing import Literal, TextIO

from twostroke.protocol.errors import ConfigError
from twostroke.protocol.requests import Peer
from twostroke.protocol.settings import Section
from twostroke.router.observe.log_format import JsonLines, TextLines

_MOST_BYTES = 64 * 1024 * 1024  # of one file; then another is begun
_OLD_FILES = 4
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


class _Rotated(RotatingFileHandler):
    """Formats a line once, where the standard one does so twice, to find out how long it will be: 28 us in place of 48
    (Nov 2026)."""

    def shouldRollover(self, record: logging.LogRecord) -> bool:
        stream: TextIO | None = self.stream
        return stream is not None and stream.tell() >= self.maxBytes


def log_to(file: Path | None, config: LoggingConfig, process: Mapping[str, str]) -> None:
    """Have this process's packages log to `file` (None: standard error), with what `process` says on JSON lines.

    Where `config` says stdout, that of the container instead. Called again, replaces what was set before. Raises
    ConfigError where there is no container whose output may be written to.
    """
    handler: logging.Handler
    if config.to == "stdout":
        try:
            handler = logging.FileHandler(_CONTAINERS_OUTPUT, encoding="utf-8")
        except OSError as error:
            raise ConfigError(
                f"logging.to: stdout is that of the container's process 1, which can't be had ({error.strerror}): set "
                "it to files where there is no container, and in one start all as the same user"
            ) from error
    elif file is None:
        handler = logging.StreamHandler(sys.stderr)
    else:
        handler = _Rotated(file, maxBytes=_MOST_BYTES, backupCount=_OLD_FILES, encoding="utf-8", delay=True)
    handler.setFormatter(JsonLines(process) if config.format == "json" else TextLines())
    logger = logging.getLogger("twostroke")
    for old in logger.handlers:
        old.close()
    logger.handlers = [handler]
    logger.propagate = False
    logger.setLevel(config.level.upper())


def log_as_replica(config: LoggingConfig, role: str, peer: Peer) -> None:
    """Have this replica of a Serve deployment log to a file of its own, in the folder of Serve's logs."""
    from ray.serve._private.logging_utils import get_serve_logs_dir  # no public function tells

    folder = Path(get_serve_logs_dir())
    folder.mkdir(parents=True, exist_ok=True)
    process = {"role": role, "worker_id": peer.worker_id, "epoch": f"{peer.epoch:016x}"}
    log_to(folder / f"twostroke_{role}_{peer.worker_id}.log", config, process)
