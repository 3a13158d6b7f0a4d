"""Calls of a worker: their replies, their log lines, and the grammars of their answers.

A call that has ended makes one line, and a request that failed alone another; no token makes one. No line has a word of
a prompt or an answer. Each grammar is compiled in a task that ends with its request.
"""

import asyncio
import logging
import traceback
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar

from twostroke.model.step import BrokenLogits, Constraint
from twostroke.protocol.clock import Clock
from twostroke.protocol.errors import (
    CallCancelled,
    EpochMismatch,
    RequestError,
    TicketRefused,
    TwostrokeError,
    loggable,
)
from twostroke.protocol.grammars import Grammars
from twostroke.protocol.requests import (
    DecodeReply,
    FinishReason,
    GenerateRequest,
    Peer,
    PrefillReply,
    Ticket,
    TokenEvent,
    about,
)
from twostroke.worker.forced_text import ForcedText
from twostroke.worker.scheduling.job import WorkerJob
from twostroke.worker.scheduling.scheduler import NewTokens

MAX_CHUNKS = 64
"""Chunks whose ends a reply has; people look at them, so further ones don't matter."""


def note_chunk(job: WorkerJob, now: float) -> None:
    """Note the end of a step with a chunk of the prompt."""
    if len(job.chunk_ends_s) < MAX_CHUNKS and job.stepped_at is not None:
        job.chunk_ends_s.append(now - job.stepped_at)


def prefill_reply(drawn: NewTokens, now: float) -> PrefillReply:
    """Return the reply to a call whose prompt is computed. Where no token is wanted, the one drawn is dropped."""
    job, event, scorer = drawn.job, drawn.event, drawn.job.sequence.scorer
    stepped_at = now if job.stepped_at is None else job.stepped_at
    if job.request.max_tokens == 0:
        event = TokenEvent(event.request_id, event.index, (), "length")
    return PrefillReply(
        event,
        job.num_cached_tokens,
        tier_tokens=job.tier_tokens,
        queue_s=stepped_at - job.ready_at,
        prefill_s=now - stepped_at,
        chunk_ends_s=tuple(job.chunk_ends_s[:-1]),
        scores=None if scorer is None else scorer.scores(),
        embedding=b"" if scorer is None else scorer.embedding(),
    )


def decode_reply(job: WorkerJob, reason: FinishReason | None) -> DecodeReply:
    """Return the reply to a call whose answer has ended; None: its router has aborted it."""
    stepped_at = job.ready_at if job.stepped_at is None else job.stepped_at
    return DecodeReply(
        num_output_tokens=job.sequence.num_output_tokens,
        finish_reason=reason,
        num_cached_tokens=job.num_cached_tokens,
        tier_tokens=job.tier_tokens,
        transfer_s=job.transfer_s,
        queue_s=max(0.0, stepped_at - job.ready_at),
        num_preemptions=job.num_preemptions,
    )


def check_ticket(request: GenerateRequest, ticket: Ticket, end: Peer, worker: Peer) -> None:
    """Raises TicketRefused or EpochMismatch where the ticket's `end` is not this worker.

    Its signature is checked by its target, which has the blocks.
    """
    if end.worker_id != worker.worker_id or ticket.request_id != request.request_id:
        raise TicketRefused(f"the ticket is for {ticket.request_id} on {end.worker_id}")
    if end.epoch != worker.epoch:
        raise EpochMismatch(f"worker {worker.worker_id} has restarted since the ticket was made out")


def grammar_too_complex() -> RequestError:
    """Return the error of an answer that leaves its grammar no next token."""
    return RequestError(
        "the answer has reached a point where its schema or grammar can't be followed: no token may come next there, "
        "or finding one takes too long: make it simpler",
        code="grammar_too_complex",
    )


_log = logging.getLogger(__name__)

ReplyT = TypeVar("ReplyT", PrefillReply, DecodeReply)

_LOGGED_FIELDS = ("finish_reason", "num_output_tokens", "num_cached_tokens", "queue_s", "prefill_s", "transfer_s")
"""The fields of replies that stand in the log line."""


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


@dataclass(eq=False)
class GrammarCompiler:
    """Keeps a request from being admitted until its grammar is ready."""

    grammars: Grammars
    drafts: bool  # forced text is a source of drafts here
    clock: Clock
    on_ready: Callable[[], None]
    on_failed: Callable[[WorkerJob, BaseException], None]  # with a RequestError where the client is at fault
    _tasks: "set[asyncio.Task[None]]" = field(default_factory=set, init=False)

    def begin(self, job: WorkerJob) -> None:
        """Compile a new request's grammar. Does nothing for one without."""
        if not job.request.grammar:
            return
        job.awaits_grammar = True
        compiling = asyncio.create_task(self._compile(job), name=f"grammar of {job.request.request_id}")
        self._tasks.add(compiling)
        compiling.add_done_callback(self._tasks.discard)
        job.compiling = compiling

    async def close(self) -> None:
        """End all tasks."""
        for compiling in self._tasks:
            compiling.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _compile(self, job: WorkerJob) -> None:
        """Let a request be admitted once its grammar is ready."""
        grammars = self.grammars
        try:
            key = (job.request.grammar, job.request.cache_salt, job.request.client)
            matcher = await grammars.matcher(*key)
            job.sequence.constraint = Constraint(matcher, partial(grammars.renewed, *key), job.request.stop_token_ids)
        except asyncio.CancelledError:
            raise
        except BaseException as error:  # llguidance may panic, which is no Exception
            self.on_failed(job, error)
            return
        job.awaits_grammar = False
        self.on_ready()
        if self.drafts and not job.is_prefill_only:
            matcher = await grammars.byte_matcher(*key)
            job.sequence.forced_text = ForcedText(matcher, grammars.tokenizer, self.clock)
