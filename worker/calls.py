"""Calls of a worker: what it keeps of each until it returns, the reply of a computed prompt, and the call's log line.

One line a call, never one a token. No line has a word of a prompt or an answer.
"""

import asyncio
import logging
import traceback
from collections.abc import Awaitable
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

from twostroke.model.step import BrokenLogits
from twostroke.protocol.clock import Clock
from twostroke.protocol.errors import CallCancelled, RequestError, TwostrokeError, loggable
from twostroke.protocol.log_context import about
from twostroke.protocol.requests import DecodeReply, GenerateRequest, PrefillReply, Ticket, TokenEvent
from twostroke.worker.scheduling.job import Phase, WorkerJob
from twostroke.worker.scheduling.step import DrawnToken

_log = logging.getLogger("twostroke.worker.call_log")
"""The name is documented (docs/observability.md): operators set its level."""

ReplyT = TypeVar("ReplyT", PrefillReply, DecodeReply)

_LOGGED_FIELDS = ("finish_reason", "num_output_tokens", "num_cached_tokens", "queue_s", "prefill_s", "transfer_s")
"""The fields of replies that stand in the log line."""


@dataclass(eq=False, slots=True)
class WorkerCall(Generic[ReplyT]):
    """A call of a worker that has not returned, or of which a transfer has not ended."""

    job: WorkerJob
    ticket: Ticket | None
    reply: "asyncio.Future[ReplyT]" = field(default_factory=lambda: asyncio.get_running_loop().create_future())
    compiling: "asyncio.Task[None] | None" = None  # of its grammar

    @property
    def request(self) -> GenerateRequest:
        return self.job.request

    @property
    def has_begun(self) -> bool:
        """True once anything is computed or received for it, or is about to be."""
        return self.job.phase is not Phase.WAITING

    @property
    def is_over(self) -> bool:
        """True once the worker may forget it."""
        return self.job.has_ended

    def cancelled(self) -> None:
        """End the call for a router that wants no answer."""
        raise NotImplementedError

    def answer(self, reply: ReplyT) -> None:
        """Return from the call, unless its awaiter is gone."""
        if not self.reply.done():
            self.reply.set_result(reply)

    def fail(self, error: TwostrokeError) -> None:
        """Raise `error` to the call's awaiter, unless it is gone."""
        if not self.reply.done():
            self.reply.set_exception(error)


def prompt_reply(drawn: DrawnToken, *, queue_s: float, prefill_s: float) -> PrefillReply:
    """Return the reply to a call that computed a prompt. A token that was drawn although none is wanted is dropped."""
    event, reading = drawn.event, drawn.job.sequence.reading
    if drawn.job.request.max_tokens == 0:
        event = TokenEvent(event.request_id, event.index, (), "length")
    return PrefillReply(
        event,
        drawn.job.num_cached_tokens,
        queue_s,
        prefill_s,
        scores=None if reading is None else reading.scores(),
        embedding=b"" if reading is None else reading.embedding(),
    )


async def logged(call: str, request: GenerateRequest, clock: Clock, reply: Awaitable[ReplyT]) -> ReplyT:
    """Await the reply to a call, and log how it ended."""
    if not _log.isEnabledFor(logging.INFO):
        return await reply
    began, outcome = clock(), "was cancelled"
    fields: dict[str, Any] = {}
    try:
        answer = await reply
        outcome = "was cancelled" if getattr(answer, "finish_reason", "") is None else "is done"
        found = {name: getattr(answer, name, None) for name in _LOGGED_FIELDS}
        fields = {name.removeprefix("num_"): _rounded(value) for name, value in found.items() if value is not None}
        return answer
    except CallCancelled:
        raise
    except Exception as error:
        # The messages of other errors may be private.
        outcome = f"failed: {loggable(error)}" if isinstance(error, TwostrokeError) else "failed"
        fields = {"error": type(error).__name__}
        raise
    finally:
        numbers = {"prompt_tokens": request.num_prompt_tokens, "e2e_s": _rounded(clock() - began)}
        _log.info("%s %s", call, outcome, extra=about(request.log_context, **numbers, **fields))


def _rounded(value: Any) -> Any:
    return round(value, 4) if isinstance(value, float) else value


def failed_alone(request: GenerateRequest, error: BaseException) -> RequestError:
    """Log why one request has failed, and return the error for its client.

    The error's own message may quote the prompt, and is neither logged nor returned.
    """
    extra = about(request.log_context)
    if isinstance(error, BrokenLogits):
        _log.error("a request has failed: its logits were NaN or infinite", extra=extra)
        return RequestError("the model's logits were no numbers on this worker", code="broken_logits", status=503)
    name = type(error).__name__
    where = "".join(traceback.format_tb(error.__traceback__))
    _log.error("a request has failed alone: %s\n%s", name, where, extra=extra)
    return RequestError(f"the server failed to compute this request ({name})", code="request_failed", status=500)
