"""`prefill` calls, from their arrival until they have returned and their transfers have ended.

The KV of prompts on its way to decode workers, layer by layer while it is being computed.

A transfer may outlive the call that it belongs to. Until it has ended the job's blocks stay as they are.
"""

import asyncio
import logging
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from twostroke.kvtransfer.sides import Outgoing, SendingSide
from twostroke.prefill_worker.scheduler import PrefillJob, PrefillScheduler
from twostroke.protocol.errors import TransferFailed, TwostrokeError
from twostroke.protocol.requests import PrefillReply, SampledToken, Ticket, TokenEvent, finish_reason


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


_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class SendingCallbacks:
    """What the worker wants to hear. Both are called on the event loop and must not wait."""

    failed: Callable[[Call], None]  # the KV has not come whole, and somebody may still wait for it
    ended: Callable[[Call], None]  # nothing reads the job's blocks any more


class Sendings:
    """One worker's transfers to decode workers. `num_layers` are the model's."""

    def __init__(self, *, sender: SendingSide, scheduler: PrefillScheduler, num_layers: int, told: SendingCallbacks):
        self._sender = sender
        self._scheduler = scheduler
        self._layers = range(num_layers)
        self._told = told

    def begin(self, call: Call) -> None:
        """Offer the KV of a job that was just admitted, unless nobody wants it."""
        if call.ticket is None:
            return
        sequence = call.job.sequence
        call.outgoing = self._sender.open(call.ticket, call.job.num_tokens, sequence.block_ids, sequence.num_computed)
        self._scheduler.begin_sending(call.job)
        call.sending = asyncio.create_task(self._see_off(call, call.outgoing), name=f"send {call.request_id}")

    def layer_computed(self, layer: int, calls: Iterable[tuple[Call, int]]) -> None:
        """This layer's KV is there for so many tokens of each call."""
        for call, num_tokens in calls:
            if call.outgoing is not None:
                call.outgoing.layer_ready(layer, num_tokens)

    def prefix_came(self, call: Call) -> None:
        """All layers' KV is there for what the job has computed or pulled so far."""
        for layer in self._layers:
            self.layer_computed(layer, [(call, call.job.sequence.num_computed)])

    async def _see_off(self, call: Call, transfer: Outgoing) -> None:
        try:
            await transfer.done()
        except TransferFailed as error:
            _log.warning("the KV of request %s was not sent: %s", call.request_id, error)
            if not call.is_aborted:  # else nobody waits for it
                self._told.failed(call)
        finally:
            self._scheduler.end_sending(call.job)
            call.sending = None
            self._told.ended(call)
