"""`prefill` calls, from their arrival until they have returned and their transfers have ended."""

import asyncio
from collections.abc import Iterator
from dataclasses import dataclass

from twostroke.kvtransfer.sides import Outgoing
from twostroke.prefill_worker.jobs import PrefillJob
from twostroke.protocol.errors import TwostrokeError
from twostroke.protocol.requests import PrefillReply, SampledToken, TokenEvent, finish_reason
from twostroke.protocol.tickets import Ticket


@dataclass(eq=False, slots=True)
class Call:
    """A `prefill` call that has not returned, or of which a transfer has not ended."""

    job: PrefillJob
    ticket: Ticket | None
    arrived_at: float
    reply: "asyncio.Future[PrefillReply]"
    started_at: float = 0.0
    outgoing: Outgoing | None = None
    is_aborted: bool = False  # its transfer has been given up here, on purpose
    sending: "asyncio.Task[None] | None" = None  # ends with the outgoing transfer, by releasing the job's blocks

    @property
    def request_id(self) -> str:
        return self.job.request.request_id

    @property
    def is_over(self) -> bool:
        """Whether it has returned, and nothing reads or writes its blocks."""
        return self.job.has_ended and self.sending is None and not self.job.is_pulling

    def answer(self, first_token: SampledToken, now: float) -> None:
        """Return from the call, unless its awaiter is gone."""
        if self.reply.done():
            return
        request = self.job.request
        given = request.num_output_tokens_given
        event = TokenEvent(
            request_id=request.request_id,
            index=given,
            tokens=(first_token,),
            finish_reason=finish_reason(request, given + 1, first_token.token_id),
        )
        self.reply.set_result(
            PrefillReply(
                event=event,
                num_cached_tokens=self.job.num_cached_tokens,
                queue_s=self.started_at - self.arrived_at,
                prefill_s=now - self.started_at,
            )
        )

    def fail(self, error: TwostrokeError) -> None:
        """Raise `error` to the call's awaiter, unless it is gone."""
        if not self.reply.done():
            self.reply.set_exception(error)


class Calls:
    """All of them. Iterating takes a copy: calls may end meanwhile."""

    def __init__(self) -> None:
        self._by_request: dict[str, Call] = {}
        self._by_job: dict[PrefillJob, Call] = {}  # those that have not returned

    def __len__(self) -> int:
        return len(self._by_request)

    def __iter__(self) -> Iterator[Call]:
        return iter(list(self._by_request.values()))

    def add(self, call: Call) -> None:
        self._by_request[call.request_id] = call
        self._by_job[call.job] = call

    def find(self, request_id: str) -> Call | None:
        return self._by_request.get(request_id)

    def of_job(self, job: PrefillJob) -> Call:
        """The call of a job that has not ended. KeyError otherwise."""
        return self._by_job[job]

    def not_returned(self) -> list[Call]:
        """Those that somebody waits for."""
        return list(self._by_job.values())

    def returned(self, call: Call) -> None:
        """The call has its answer, or has none to expect."""
        del self._by_job[call.job]
        self.forget_if_over(call)

    def forget_if_over(self, call: Call) -> None:
        """To be called at the end of each part of it."""
        if call.is_over:
            del self._by_request[call.request_id]
