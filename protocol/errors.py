"""Every error that crosses a part's border.

    TwostrokeError
    |-- ConfigError              a setting, file or folder is wrong: names it, and the way out
    |-- RequestError             a request can't be served as asked (the client's fault)
    |-- ConnectionLost           the peer is gone, or the connection was closed under us
    |   `-- ProtocolError        the peer sent what it must not: bad MAC, too long, unknown message
    |-- EpochMismatch            a message or ticket of another incarnation of a process
    |-- TicketRefused            forged, used twice, or made out to somebody else
    |-- TransferFailed           the KV of a request did not arrive whole; the reason is for logs
    `-- WorkerLost               the worker that served a request died, or can't be reached
        |-- CallCancelled        its router wants no answer any more
        |-- WorkerLeaving        it is being taken down on purpose, and is nobody's failure
        `-- WorkerFailed         it lives, and has failed the request all the same

Foreign exceptions (OSError, torch's RuntimeError, Ray's errors) are mapped to these at the edge where they arise.
"""

import sys


def how_to_install(extra: str) -> str:
    """The end of a sentence about packages of an extra that are missing. Nothing of ours is on a package index."""
    return f"in the project's checkout, {sys.executable} -m pip install -e '.[{extra}]'"


class TwostrokeError(Exception):
    """Base of all errors raised on purpose."""


class ConfigError(TwostrokeError):
    """A setting, file or folder is wrong. The message is one line that a user can act on."""


class RequestError(TwostrokeError):
    """A request that can't be served as asked.

    `param` names the request field at fault, `code` is a stable word for programs, `status` the HTTP status,
    `retry_after_s` when the same request may be served.
    """

    def __init__(
        self,
        message: str,
        *,
        param: str | None = None,
        code: str = "invalid_value",
        status: int = 400,
        retry_after_s: int | None = None,
    ):
        super().__init__(message)
        self.param = param
        self.code = code
        self.status = status
        self.retry_after_s = retry_after_s


class ConnectionLost(TwostrokeError):
    """The peer is gone, or the connection was closed under us."""


class ProtocolError(ConnectionLost):
    """The peer broke the protocol. Only its own connection is closed."""


class EpochMismatch(TwostrokeError):
    """A message or ticket belongs to another incarnation of a process."""


class TicketRefused(TwostrokeError):
    """A ticket is forged, was used before, or is made out to other workers."""


class TransferFailed(TwostrokeError):
    """The KV of a request did not arrive whole and verified."""


class WorkerLost(TwostrokeError):
    """The worker that served a request died, or can't be reached, before it finished."""


class CallCancelled(WorkerLost):
    """The router wants no answer any more."""


class WorkerLeaving(WorkerLost):
    """The worker is being taken down on purpose: the request goes on elsewhere."""


class WorkerFailed(WorkerLost):
    """The worker lives, and has failed the request all the same."""


def loggable(error: TwostrokeError) -> str:
    """Return what log lines tell of an error: of a request that is wrong the code, since the words may quote it."""
    return error.code if isinstance(error, RequestError) and error.status == 400 else str(error)


def public_error(error: TwostrokeError) -> RequestError:
    """Return the error that a client gets. Only a RequestError's words go out; others may reveal internals."""
    if isinstance(error, RequestError):
        return error
    return RequestError("the server lost the workers of this request; try again", code="worker_lost", status=503)
