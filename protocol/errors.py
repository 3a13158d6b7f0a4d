"""Every error that crosses a part's border.

    TwostrokeError
    |-- ConfigError              a setting, file or folder is wrong: names it, and the way out
    |-- RequestError             a request can't be served as asked (the client's fault)
    |   `-- ContextExceeded      it needs more tokens than the model's context has
    |-- ConnectionLost           the peer is gone, or the connection was closed under us
    |   `-- ProtocolError        the peer sent what it must not: bad MAC, too long, unknown message
    |-- EpochMismatch            a message or ticket of another incarnation of a process
    |-- TicketRefused            forged, used twice, or made out to another worker
    |-- TransferFailed           the KV of a request did not arrive whole; the reason is for logs
    `-- WorkerLost               the worker that served a request died, or can't be reached
        |-- CallCancelled        its router wants no answer any more
        |-- WorkerLeaving        it is being taken down on purpose, which is no failure
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


class ContextExceeded(RequestError):
    """A prompt, or prompt and answer together, of more tokens than the context has.

    Clients know it by OpenAI's words, which these are.
    """

    def __init__(
        self,
        source: str,
        num_prompt_tokens: int,
        max_context: int,
        max_tokens: int | None = None,
        limited_by: str = "max_tokens",
    ):
        """`source`: the prompt's field. `max_tokens`: those of the answer, which the field `limited_by` asks for; None:
        the prompt has too many by itself."""
        super().__init__("", param=source if max_tokens is None else limited_by, code="context_length_exceeded")
        self.args = (source, num_prompt_tokens, max_context, max_tokens, limited_by)
        self.source = source
        self.num_prompt_tokens = num_prompt_tokens
        self.max_context = max_context
        self.max_tokens = max_tokens

    def __str__(self) -> str:
        begin, source = f"This model's maximum context length is {self.max_context} tokens. However, ", self.source
        if self.max_tokens is None:
            return (
                f"{begin}your {source} resulted in {self.num_prompt_tokens} tokens, and an answer needs room, too. "
                f"Please reduce the length of the {source}."
            )
        room = max(0, self.max_context - self.num_prompt_tokens)
        asked = f"{self.num_prompt_tokens} in the {source}, {self.max_tokens} in the completion"
        return (
            f"{begin}you requested {self.num_prompt_tokens + self.max_tokens} tokens ({asked}). Please reduce the "
            f"length of the {source}, or {self.param} to {room}."
        )

    @property
    def in_anthropics_words(self) -> str:
        """Return the message by which clients of Anthropic's API know this."""
        num, most = self.num_prompt_tokens, self.max_context
        if self.max_tokens is None:
            return f"prompt is too long: {num} tokens > {min(most, num - 1)} maximum"
        way_out = "decrease input length or `max_tokens` and try again"
        return f"input length and `max_tokens` exceed context limit: {num} + {self.max_tokens} > {most}, {way_out}"


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


def is_unicode(text: str) -> bool:
    """True where the text can be encoded: Python reads the half of a surrogate pair that JSON escapes."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True
