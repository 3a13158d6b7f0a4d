"""What happens in an attempt, told to all who keep count of it. An attempt calls workers; this is where it is heard."""

from dataclasses import dataclass

from twostroke.protocol.clock import Clock
from twostroke.protocol.errors import TransferFailed, TwostrokeError
from twostroke.protocol.requests import DecodeReply, GenerateRequest, Peer, PrefillReply, TokenEvent
from twostroke.router.fleet import Path
from twostroke.router.health.poison import Case
from twostroke.router.health.worker_records import WorkerRecords
from twostroke.router.observe.stages import Stages
from twostroke.router.routing.chooser import PathChooser
from twostroke.router.routing.in_flight import Hold


@dataclass(eq=False)
class Progress:
    """Of one attempt on `path`: its sequence's stages, its places at workers, and what is known of those workers.

    `failed` gets a prefill worker that fails.
    """

    path: Path
    hold: Hold
    case: Case
    stages: Stages
    failed: set[Peer]
    records: WorkerRecords
    chooser: PathChooser
    clock: Clock
    has_got_on: bool = False  # the decode worker has drawn a token of its own
    has_lost_prefill: bool = False  # no KV comes from the prefill worker
    began: float = 0.0

    async def begin(self) -> None:
        """Before the first call; a suspect waits until it may be tried. Raises PoisonRequest."""
        self.stages.begin_attempt()
        self.began = self.clock()
        await self.records.begin(self.case, self.path)

    def prefill_begins(self, worker: Peer) -> None:
        """The prefill worker is about to be called. Raises PoisonRequest."""
        self.records.computes(self.case, worker)

    def prefilled(self, request: GenerateRequest, worker: Peer, reply: PrefillReply) -> None:
        """The prefill worker has computed the prompt."""
        stages = self.stages
        stages.prefill_queue_s = reply.queue_s
        stages.prefill_s = reply.prefill_s
        stages.num_cached_tokens = min(reply.num_cached_tokens, request.num_prompt_tokens)
        self.records.prompt_done(self.case, worker, self.path.decode.peer)
        self.chooser.prefilled(self.path, len(request.token_ids), reply)

    def prefill_failed(self, worker: Peer, error: TwostrokeError) -> None:
        """No KV comes from the prefill worker. Harmless when repeated: the call and the transfer may fail both."""
        if self.has_lost_prefill:
            return
        self.has_lost_prefill = True
        if isinstance(error, TransferFailed):
            self.records.pair_failed(worker, self.path.decode.peer)
        else:
            self.records.failed(self.case, worker, error)
        self.failed.add(worker)

    def prefill_ended(self, worker: Peer) -> None:
        """The prefill worker has nothing more to do, whatever came of it."""
        self.hold.release(worker)

    def wants_another_prefill(self, request: GenerateRequest) -> bool:
        """Whether another prefill worker had better compute the prompt than the decode worker, busy as it is."""
        return self.chooser.is_quicker_by_a_pair(request, self.path.decode.peer, self.failed)

    async def decode_alone(self) -> None:
        """The decode worker is to do without the prefill worker. A suspect waits. Raises PoisonRequest."""
        self.stages.prefill_failures += 1
        await self.records.may_compute(self.case, self.path.decode.peer)

    def came(self, request: GenerateRequest, event: TokenEvent, *, is_heard: bool) -> None:
        """These tokens are new. `is_heard` tells whether the decode worker has said anything yet."""
        self.hold.prompt_computed()
        now, stages = self.clock(), self.stages
        if stages.first_token is None and event.tokens:
            stages.first_token = now
        stages.num_output_tokens += len(event.tokens)
        if event.finish_reason is not None:
            stages.finish = now
        self.case.position = event.index + len(event.tokens)
        if self.has_got_on:
            return
        if is_heard:
            self.records.has_kv(self.case, self.path.decode.peer)
        # The first token may be the prefill worker's, which the decode worker merely repeats.
        has_kv = self.path.prefill is not None and not self.has_lost_prefill
        if self.case.position > request.num_output_tokens_given + has_kv:
            self.has_got_on = True
            self.records.got_on(self.case, self.path, self.case.position - 1)

    def decoded(self, request: GenerateRequest, reply: DecodeReply, *, had_transfer: bool) -> None:
        """The decode worker's call has returned. `had_transfer`: KV was to come from another worker."""
        stages = self.stages
        stages.num_preemptions += reply.num_preemptions
        stages.transfer_s = reply.transfer_s if had_transfer else None
        stages.decode_queue_s = reply.queue_s
        if stages.prefill_s is None:  # the prompt was computed there
            stages.num_cached_tokens = min(reply.num_cached_tokens, request.num_prompt_tokens)
        if self.path.prefill is None:
            self.chooser.decoded(self.path, len(request.token_ids), reply)

    def decode_failed(self, error: TwostrokeError) -> None:
        """The decode worker has failed the request, or the request the worker."""
        self.records.failed(self.case, self.path.decode.peer, error)

    def end(self, template: GenerateRequest, sent: list[int], error: TwostrokeError | None) -> None:
        """The attempt has nothing open any more. `sent` are all outputs of the sequence."""
        self.hold.release()
        self.stages.end_attempt(self.began, self.clock(), self.path, error)
        self.records.ended(self.case, self.path)
        if self.has_got_on:
            self.chooser.answered(self.path, template, sent)
