"""Calls of a worker: what it keeps of each until it returns, and the reply of a computed prompt."""

import asyncio
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from twostroke.protocol.errors import TwostrokeError
from twostroke.protocol.requests import DecodeReply, GenerateRequest, PrefillReply, Ticket, TokenEvent
from twostroke.worker.scheduling.job import Phase, WorkerJob
from twostroke.worker.scheduling.step import DrawnToken

ReplyT = TypeVar("ReplyT", PrefillReply, DecodeReply)


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
