"""Calls of a worker: what it keeps of each until it returns, and the replies."""

import asyncio
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from twostroke.kvtransfer.ranks import Incoming, Outgoing
from twostroke.protocol.errors import CallCancelled, EpochMismatch, RequestError, TicketRefused, TwostrokeError
from twostroke.protocol.requests import (
    DecodeReply,
    FinishReason,
    GenerateRequest,
    Peer,
    PrefillReply,
    Ticket,
    TokenEvent,
)
from twostroke.worker.calls.call_log import failed_alone
from twostroke.worker.scheduling.job import Phase, WorkerJob
from twostroke.worker.scheduling.step import NewTokens

ReplyT = TypeVar("ReplyT", PrefillReply, DecodeReply)

MOST_CHUNKS = 64
"""Chunks whose ends a reply has; people look at them, so further ones don't matter."""


@dataclass(eq=False, slots=True)
class WorkerCall(Generic[ReplyT]):
    """A call of a worker that has not returned, or of which a transfer has not ended."""

    job: WorkerJob
    ticket: Ticket | None
    reply: "asyncio.Future[ReplyT]" = field(default_factory=lambda: asyncio.get_running_loop().create_future())
    compiling: "asyncio.Task[None] | None" = None  # of its grammar
    ready_at: float = 0.0  # when it could first have been stepped: its arrival, or the arrival of its KV
    stepped_at: float | None = None

    @property
    def request(self) -> GenerateRequest:
        return self.job.request

    @property
    def has_begun(self) -> bool:
        """True once anything is computed or received for it, or is about to be."""
        return self.stepped_at is not None or self.job.is_offered or self.job.phase is not Phase.WAITING

    @property
    def is_over(self) -> bool:
        """True once it has returned, and nothing sends its KV: the worker may forget it."""
        return self.job.has_ended and not self.job.is_sending

    def begin_step(self, now: float) -> None:
        """Note the first step that the request is in."""
        if self.stepped_at is None:
            self.stepped_at = now

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


@dataclass(eq=False, slots=True)
class PrefillCall(WorkerCall[PrefillReply]):
    """A call that ends with the prompt's first token, or with its scores; its ticket is for the KV that goes out."""

    chunk_ends_s: list[float] = field(default_factory=list)
    outgoing: Outgoing | None = None
    is_aborted: bool = False  # its transfer has been given up here, on purpose

    def note_chunk(self, now: float) -> None:
        """Note the end of a step with a chunk of the prompt."""
        if len(self.chunk_ends_s) < MOST_CHUNKS and self.stepped_at is not None:
            self.chunk_ends_s.append(now - self.stepped_at)

    def finish(self, drawn: NewTokens, now: float) -> None:
        """Return from the call, whose prompt is computed. A token that was drawn although none is wanted is dropped."""
        stepped_at = now if self.stepped_at is None else self.stepped_at
        try:
            event, scorer = drawn.event, drawn.job.sequence.scorer
            if self.request.max_tokens == 0:
                event = TokenEvent(event.request_id, event.index, (), "length")
            reply = PrefillReply(
                event,
                drawn.job.num_cached_tokens,
                tier_tokens=drawn.job.tier_tokens,
                queue_s=stepped_at - self.ready_at,
                prefill_s=now - stepped_at,
                chunk_ends_s=tuple(self.chunk_ends_s[:-1]),
                scores=None if scorer is None else scorer.scores(),
                embedding=b"" if scorer is None else scorer.embedding(),
            )
        except Exception as error:
            self.fail(failed_alone(self.request, error))
            return
        self.answer(reply)

    def cancelled(self) -> None:
        self.fail(CallCancelled("the router cancelled the request"))


@dataclass(eq=False, slots=True)
class DecodeCall(WorkerCall[DecodeReply]):
    """A call that ends with the answer; its ticket is for the prompt's KV that comes in."""

    transfer_s: float = 0.0
    incoming: Incoming | None = None
    computes_prompt: bool = False  # its prompt may be computed here
    router_wait: asyncio.TimerHandle | None = None  # its transfer has failed; runs until its router must have answered

    def finish(self, reason: FinishReason | None) -> None:
        """Return from the call, unless its awaiter is gone."""
        stepped_at = self.ready_at if self.stepped_at is None else self.stepped_at
        self.answer(
            DecodeReply(
                num_output_tokens=self.job.sequence.num_output_tokens,
                finish_reason=reason,
                num_cached_tokens=self.job.num_cached_tokens,
                tier_tokens=self.job.tier_tokens,
                transfer_s=self.transfer_s,
                queue_s=max(0.0, stepped_at - self.ready_at),
                num_preemptions=self.job.num_preemptions,
            )
        )

    def cancelled(self) -> None:
        self.finish(None)


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
