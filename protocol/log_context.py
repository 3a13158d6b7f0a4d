"""The request that a log line is about, named alike by routers and workers, so that lines of all processes join.

These are labels. No decision depends on them.
"""

from contextvars import ContextVar
from typing import Any

import msgspec


class LogContext(msgspec.Struct, frozen=True, array_like=True):
    """Names of a request, and of its attempt where the line is about one. Empty ones are left out of a line."""

    request_id: str = ""  # the `X-Request-Id` of its answer
    trace_id: str = ""  # of W3C trace context, 32 hexadecimal digits; empty: it has no trace
    choice: int = 0
    attempt: int = 0  # from 1 on; 0: the line is about no attempt
    prefill_worker: str = ""
    decode_worker: str = ""

    def fields(self) -> dict[str, str | int]:
        """Return the fields of a log line."""
        found: dict[str, str | int] = {"request_id": self.request_id, "trace_id": self.trace_id}
        if self.attempt:
            found |= {"choice": self.choice, "attempt": self.attempt}
            found |= {"prefill_worker": self.prefill_worker, "decode_worker": self.decode_worker}
        return {name: value for name, value in found.items() if value != ""}


NO_REQUEST = LogContext()

LOG_CONTEXT: ContextVar[LogContext] = ContextVar("LOG_CONTEXT", default=NO_REQUEST)
"""The HTTP request that a router's task serves, inherited by the tasks that it starts. Workers have none: a step
serves many requests."""

CONTEXT = "log_context"
"""The attribute of a log record with its LogContext; a record without one is about LOG_CONTEXT's request."""
FIELDS = "fields"
"""The attribute of a log record with names and values beside the message."""


def about(context: LogContext, **fields: Any) -> dict[str, Any]:
    """Return the `extra` of a log record about this request."""
    return {CONTEXT: context, FIELDS: fields}
