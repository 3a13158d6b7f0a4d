"""Log lines, as text or as JSON. What comes from outside can't break a line or paint a terminal in either.

Prompts, answers and API keys are never logged; `tests/router/observe/test_request_log.py` looks for them.
"""

import json
import logging
import time
import traceback
from collections.abc import Mapping
from typing import Any

from twostroke.protocol.requests import CONTEXT, FIELDS, LOG_CONTEXT, LogContext


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
        line |= _context_of(record).fields()
        line |= getattr(record, FIELDS, {})
        if record.exc_info:
            line["exception"] = _traceback(record)
        return json.dumps(line)  # ASCII alone: control characters, line separators of Unicode too, are escaped


class TextLines(logging.Formatter):
    """Formats for people: time, level, logger, message, then fields. A traceback follows on its own lines."""

    def format(self, record: logging.LogRecord) -> str:
        context = _context_of(record).fields()
        request_id = context.pop("request_id", "")
        label = f" [{request_id}]" if request_id else ""
        fields = "".join(f" {name}={value}" for name, value in (context | getattr(record, FIELDS, {})).items())
        words = _printable(f"{record.name}{label}: {record.getMessage()}{fields}")
        line = f"{_utc(record.created)} {record.levelname} {words}"
        if record.exc_info:
            line += "".join(f"\n    {_printable(frame)}" for frame in _traceback(record).splitlines())
        return line


def _context_of(record: logging.LogRecord) -> LogContext:
    context: LogContext | None = getattr(record, CONTEXT, None)
    return LOG_CONTEXT.get() if context is None else context


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
