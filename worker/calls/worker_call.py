"""Calls of a worker: their replies, their log lines, and the grammars of their answers."""

from twostroke.protocol.errors import EpochMismatch, RequestError, TicketRefused
from twostroke.protocol.requests import (
    DecodeReply,
    FinishReason,
    GenerateRequest,
    Peer,
    PrefillReply,
    Ticket,
    TokenEvent,
)
from twostroke.worker.scheduling.job import WorkerJob
from twostroke.worker.scheduling.step import NewTokens

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
