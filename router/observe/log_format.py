"""Log lines, as text or as JSON. What comes from outside can't break a line or paint a terminal in either.

Prompts, answers and API keys are never logged; `tests/router/observe/test_access_log.py` looks for them.
"""

import json
import logging
import time
import traceback
from collections.abc import Mapping
from contextvars import ContextVar
from typing import Any

REQUEST_ID: ContextVar[str] = ContextVar("REQUEST_ID", default="")
"""The `X-Request-Id` of the HTTP request that a task serves, inherited by the tasks that it starts."""

FIELDS = "fields"
"""What a record may have as `extra`: names and values beside the message."""


class JsonLines(logging.Formatter):
    """One JSON object a line. `process` is what every line of this process has, such as its worker id."""

    def __init__(self, process: Mapping[str, str]):
        super().__init__()
        self._process = dict(process)

    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, Any] = {
            "time": _utc(record.created),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
            **self._process,
        }
        if request_id := REQUEST_ID.get():
            line["request_id"] = request_id
        line |= getattr(record, FIELDS, {})
        if record.exc_info:
            line["exception"] = _traceback(record)
        return json.dumps(line)  # ASCII alone: control characters, line separators of Unicode too, are escaped


class TextLines(logging.Formatter):
    """For people: time, level, logger, message, then fields. A traceback follows on lines of its own."""

    def format(self, record: logging.LogRecord) -> str:
        fields = "".join(f" {name}={value}" for name, value in getattr(record, FIELDS, {}).items())
        request_id = REQUEST_ID.get()
        label = f" [{request_id}]" if request_id else ""
        words = _printable(f"{record.getMessage()}{fields}")
        line = f"{_utc(record.created)} {record.levelname} {record.name}{label}: {words}"
        if record.exc_info:
            line += "".join(f"\n    {_printable(frame)}" for frame in _traceback(record).splitlines())
        return line


def _traceback(record: logging.LogRecord) -> str:
    """Return the record's traceback as text.

    `logging.Formatter.formatException` writes it by the builtin `print`, which Ray Serve replaces in its replicas by
    one that takes no notice of where the text is to go.
    """
    exc_info = record.exc_info
    return "" if not exc_info else "".join(traceback.format_exception(exc_info[1])).rstrip("\n")


def _printable(text: str) -> str:
    return "".join(char if char.isprintable() else char.encode("unicode_escape").decode() for char in text)


def _utc(seconds: float) -> str:
    whole = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(seconds))
    return f"{whole}.{int(seconds % 1 * 1000):03d}Z"
