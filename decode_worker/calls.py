"""`decode` calls that have not returned: how each is found, and how it is answered."""

import asyncio
from collections.abc import Iterator
from dataclasses import dataclass

from twostroke.decode_worker.jobs import DecodeJob, Phase
from twostroke.kvtransfer.sides import Incoming
from twostroke.protocol.errors import TwostrokeError
from twostroke.protocol.requests import DecodeReply, FinishReason, GenerateRequest, Ticket


@dataclass(eq=False, slots=True)
class Call:
    """A `decode` call that has not returned."""

    job: DecodeJob
    ticket: Ticket | None
    reply: "asyncio.Future[DecodeReply]"
    ready_at: float  # when it could first have been stepped: its arrival, or when its KV was there
    stepped_at: float | None = None
    transfer_s: float = 0.0
    incoming: Incoming | None = None
    is_on_its_own: bool = False  # its prompt may be computed here
    patience: asyncio.TimerHandle | None = None  # its transfer has failed; for how long it waits for the router's word

    @property
    def request(self) -> GenerateRequest:
        return self.job.request

    @property
    def has_begun(self) -> bool:
        """Whether anything has been computed or received for it, or is about to be."""
        return self.stepped_at is not None or self.job.is_offered or self.job.phase is not Phase.WAITING

    def answer(self, reason: FinishReason | None) -> None:
        """Return from the call, unless its awaiter is gone."""
        if self.reply.done():
            return
        stepped_at = self.ready_at if self.stepped_at is None else self.stepped_at
        self.reply.set_result(
            DecodeReply(
                num_output_tokens=self.job.sequence.num_output_tokens,
                finish_reason=reason,
                num_cached_tokens=self.job.num_cached_tokens,
                transfer_s=self.transfer_s,
                queue_s=max(0.0, stepped_at - self.ready_at),
                num_preemptions=self.job.num_preemptions,
            )
        )

    def fail(self, error: TwostrokeError) -> None:
        """Raise `error` to the call's awaiter, unless it is gone."""
        if not self.reply.done():
            self.reply.set_exception(error)


class Calls:
    """All of them, by request and by job. Iterating takes a copy: calls may end meanwhile."""

    def __init__(self) -> None:
        self._by_request: dict[str, Call] = {}
        self._by_job: dict[DecodeJob, Call] = {}

    def __len__(self) -> int:
        return len(self._by_request)

    def __iter__(self) -> Iterator[Call]:
        return iter(list(self._by_request.values()))

    def add(self, call: Call) -> None:
        self._by_request[call.request.request_id] = call
        self._by_job[call.job] = call

    def remove(self, call: Call) -> None:
        del self._by_request[call.request.request_id]
        del self._by_job[call.job]

    def find(self, request_id: str) -> Call | None:
        return self._by_request.get(request_id)

    def of_job(self, job: DecodeJob) -> Call:
        """The call of a job that has not ended. KeyError otherwise."""
        return self._by_job[job]
