"""One try of a request on one pair of workers: read `Attempt.events`.

Everything an attempt opens (two calls, one stream) ends with it, on every path: finish, fault, the client leaving.
What happens on the way is told to its `AttemptObserver`, which tells all who keep count of it.
"""

import asyncio
import logging
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass

from twostroke.protocol.clock import Clock
from twostroke.protocol.errors import RequestError, TransferFailed, TwostrokeError, WorkerFailed, WorkerLost, loggable
from twostroke.protocol.log_context import about
from twostroke.protocol.messages import Cancel, PrefillFailed, SendPrefix
from twostroke.protocol.requests import (
    DecodeReply,
    GenerateRequest,
    Peer,
    PrefillReply,
    Ticket,
    TokenEvent,
    mint_ticket,
)
from twostroke.protocol.stats import WorkerInfo
from twostroke.router.channels.token_channels import TokenChannels
from twostroke.router.channels.token_stream import join_fresh
from twostroke.router.fleet import Fleet, Path
from twostroke.router.generate.config import PipelineConfig
from twostroke.router.health.poison import SuspectRequest
from twostroke.router.health.worker_records import WorkerRecords
from twostroke.router.observe.stages import SequenceStages
from twostroke.router.routing.chooser import PathChooser
from twostroke.router.routing.in_flight import Hold

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class AttemptDeps:
    """What all attempts of a router replica share. `secret` is the cluster's, to sign tickets."""

    fleet: Fleet
    channels: TokenChannels
    secret: bytes
    config: PipelineConfig


@dataclass(eq=False)
class AttemptObserver:
    """Of one attempt on `path`: its sequence's stages, its places at workers, and what is known of those workers.

    `failed` gets a prefill worker that fails.
    """

    path: Path
    hold: Hold
    case: SuspectRequest
    stages: SequenceStages
    failed: set[Peer]
    records: WorkerRecords
    chooser: PathChooser
    clock: Clock
    has_got_on: bool = False  # the decode worker has drawn a token of its own
    has_lost_prefill: bool = False  # no KV comes from the prefill worker
    began: float = 0.0

    async def begin(self) -> None:
        """Before the first call; a suspect waits until it may be tried. Raises PoisonRequest."""
        self.began = self.clock()
        self.stages.begin_attempt(self.began, self.path)
        await self.records.begin(self.case, self.path)

    def prefill_begins(self, worker: Peer) -> None:
        """The prefill worker is about to be called. Raises PoisonRequest."""
        self.records.computes(self.case, worker)

    def prefilled(self, request: GenerateRequest, worker: Peer, reply: PrefillReply) -> None:
        """The prefill worker has computed the prompt."""
        stages = self.stages
        stages.prompt_done = self.clock()
        stages.prefill_queue_s = reply.queue_s
        stages.prefill_s = reply.prefill_s
        stages.chunk_ends_s = reply.chunk_ends_s
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
        if event.num_cached_tokens is not None and (self.path.prefill is None or self.has_lost_prefill):
            # The reply says it, too, but does not come where a stop string ends the answer here.
            stages.num_cached_tokens = min(event.num_cached_tokens, request.num_prompt_tokens)
        self.case.position = event.index + len(event.tokens)
        if self.has_got_on:
            return
        if is_heard:
            self.records.has_kv(self.case, self.path.decode.peer)
        # The first token may be the prefill worker's, which the decode worker merely repeats.
        has_kv = self.path.prefill is not None and not self.has_lost_prefill
        if self.case.position > request.num_output_tokens_given + has_kv:
            self.has_got_on = True
            stages.decoding = now
            self.records.got_on(self.case, self.path, self.case.position - 1)

    def decoded(self, request: GenerateRequest, reply: DecodeReply, *, had_transfer: bool) -> None:
        """The decode worker's call has returned. `had_transfer`: KV was to come from another worker."""
        stages = self.stages
        stages.num_preemptions += reply.num_preemptions
        stages.transfer_s = reply.transfer_s if had_transfer else None
        stages.decode_queue_s = reply.queue_s
        stages.num_skipped_tokens = reply.num_cached_tokens if had_transfer else 0
        if stages.prefill_s is None:  # the prompt was computed there
            stages.num_cached_tokens = min(reply.num_cached_tokens, request.num_prompt_tokens)
        if self.path.prefill is None:
            self.chooser.decoded(self.path, len(request.token_ids), reply)

    def read(self, request: GenerateRequest, reply: PrefillReply) -> None:
        """A prompt that is read alone has been: nothing more comes of it."""
        stages = self.stages
        stages.prefill_queue_s, stages.prefill_s = reply.queue_s, reply.prefill_s
        stages.num_cached_tokens = min(reply.num_cached_tokens, request.num_prompt_tokens)
        stages.num_output_tokens = len(reply.event.tokens)
        stages.first_token = stages.finish = self.clock()
        self.hold.prompt_computed()
        self.records.got_on(self.case, self.path, 0)

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


class PrefillMoved(WorkerLost):
    """No KV comes, and another prefill worker had better compute the prompt: the decode worker is not to blame."""


class Attempt:
    """One try. It has its own request id, so that nothing of another try can be taken for it."""

    def __init__(self, around: AttemptDeps, request: GenerateRequest, progress: AttemptObserver):
        """`request` is this try's own, the outputs so far in its tokens. Raises WorkerLost without a channel."""
        self._channels = around.channels
        self._fleet = around.fleet
        self._secret = around.secret
        self._config = around.config
        self._request = request
        self._progress = progress
        self._path = progress.path
        self._decode = self._path.decode.peer
        self._telling: asyncio.Task[None] | None = None  # the decode worker that no KV comes from the prefill worker
        self._ticket = None
        if self._path.prefill is not None:
            self._ticket = self._mint(self._path.prefill, self._path.decode)
        self._stream = around.channels.subscribe(self._decode, request.request_id, max_tokens=request.max_tokens)

    async def events(self, sent: Sequence[int], time_left_s: float) -> AsyncGenerator[TokenEvent, None]:
        """Call both workers at once and yield what follows `sent`. Raises WorkerLost or RequestError.

        The reader extends `sent` by each event before it asks for the next. After `time_left_s` the attempt fails.
        """
        request_id = self._request.request_id
        prefill = self._path.prefill
        calls = {self._decode: asyncio.create_task(self._call_decode())}
        if prefill is not None:
            calls[prefill.peer] = asyncio.create_task(self._call_prefill(prefill))
        timer = asyncio.get_running_loop().call_later(time_left_s, self._stream.fail, out_of_time())
        complete = False
        try:
            async for first in self._stream:
                event = join_fresh((first, *self._stream.take_queued()), sent)
                if event is None:
                    continue
                self._progress.came(self._request, event, is_heard=self._stream.heard)
                yield event
                if event.finish_reason is not None:
                    break
            if self._stream.heard:  # else the first token was the last: the decode worker has nothing to do
                # The calls return about now, and tell how it went.
                await asyncio.wait(calls.values(), timeout=self._config.reply_grace_s)
                complete = calls[self._decode].done()
        except PrefillMoved:
            raise
        except (WorkerLost, RequestError) as error:
            self._progress.decode_failed(error)
            raise
        finally:
            timer.cancel()
            self._stream.close()
            for worker, call in calls.items():
                if not (complete and call.done()):
                    # The channel is quicker than the call, works where the call is stuck, and reaches a prefill
                    # worker whose call is over and whose transfer is not.
                    self._channels.send(worker, Cancel(request_id))
                call.cancel()
            tasks = list(calls.values())
            if prefill is not None:
                self._channels.unwatch_sending(prefill.peer, request_id)
            if self._telling is not None:
                self._telling.cancel()
                tasks.append(self._telling)
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _call_decode(self) -> None:
        """Run the request on the decode worker; its tokens come by the channel, its failure goes into the stream."""
        stream = self._stream
        try:
            pull = self._ask_for_prefix() if self._path.prefill is None else None
            reply = await self._fleet.decode(self._decode, self._request, self._ticket, pull)
        except TwostrokeError as error:
            stream.fail(error)
            return
        except Exception as error:
            _log.exception("the decode call failed unexpectedly", extra=about(self._request.log_context))
            stream.fail(WorkerFailed(f"the decode call failed: {type(error).__name__}"))
            return
        self._progress.decoded(self._request, reply, had_transfer=self._ticket is not None or pull is not None)
        if reply.finish_reason is None:
            stream.fail(WorkerFailed("the decode worker cancelled the request"))
        else:  # the reply may overtake the last frame, but not by much
            stream.fail_in(self._config.reply_grace_s, WorkerFailed("the last tokens did not come"))

    async def _call_prefill(self, worker: WorkerInfo) -> None:
        """Run the prompt on the prefill worker. Should that fail, the decode worker is told to do it itself.

        So it is where the KV is not sent: the worker tells that apart from its reply, earlier or later. With the
        channel the worker is lost, and the call ended: that of a stopped worker just hangs.
        """
        request_id = self._request.request_id
        call = asyncio.current_task()

        def not_sent() -> None:
            is_lost = not self._channels.is_connected(worker.peer)
            if not self._stream.heard:  # else the decode worker needs nothing any more
                why = "is lost" if is_lost else "did not send the KV"
                error = (WorkerLost if is_lost else TransferFailed)(f"{worker.peer.worker_id} {why}")
                self._without_prefill(worker.peer, error)
            if is_lost and call is not None:
                call.cancel()

        try:
            await self._channels.ensure(worker)
            self._channels.watch_sending(worker.peer, request_id, not_sent)
            self._progress.prefill_begins(worker.peer)
            pull = self._ask_for_prefix()
            reply = await self._fleet.prefill(worker.peer, self._request, self._ticket, pull)
            if reply.event.error is not None:
                raise WorkerFailed(reply.event.error)
        except TwostrokeError as error:
            self._without_prefill(worker.peer, error)
        except Exception as error:
            _log.exception("the prefill call failed unexpectedly", extra=about(self._request.log_context))
            self._without_prefill(worker.peer, WorkerFailed(f"the prefill call failed: {type(error).__name__}"))
        else:
            self._progress.prefilled(self._request, worker.peer, reply)
            self._stream.push(reply.event)
        finally:
            self._progress.prefill_ended(worker.peer)

    def _without_prefill(self, worker: Peer, error: TwostrokeError) -> None:
        extra = about(self._request.log_context, error=type(error).__name__)
        _log.warning("the prefill on %s failed: %s", worker.worker_id, loggable(error), extra=extra)
        self._progress.prefill_failed(worker, error)
        if self._telling is None:
            self._telling = asyncio.create_task(self._tell_of_failed_prefill())

    async def _tell_of_failed_prefill(self) -> None:
        """The prefill has failed: tell the decode worker, until it is heard, and it computes the prompt.

        Unless it is busy, and another prefill worker would be much quicker: then the attempt ends for the next one. A
        suspect waits until it may be computed. What it finds out of itself meanwhile, the request fails of.
        """
        if not self._stream.heard and self._progress.wants_another_prefill(self._request):
            self._stream.fail(PrefillMoved("its prefill worker failed, and another one is to compute the prompt"))
            return
        try:
            await self._progress.decode_alone()
        except RequestError as error:
            self._stream.fail(error)
            return
        while not self._stream.heard:
            self._channels.send(self._decode, PrefillFailed(self._request.request_id))
            await asyncio.sleep(self._config.prefill_failed_repeat_s)

    def _ask_for_prefix(self) -> Ticket | None:
        """Have the path's source send what it holds of the prompt; the ticket for who computes it.

        None where there is no source, or no channel to it now: the target would wait for it in vain. A source that
        holds less than was thought sends less, or nothing, and whoever pulls computes the rest.
        """
        source = self._path.source
        if source is None or not self._channels.is_connected(source.peer):
            return None
        ticket = self._mint(source, self._path.reader)
        request = self._request
        asked = SendPrefix(ticket, request.token_ids, request.cache_salt, request.log_context)
        self._channels.send(source.peer, asked)
        return ticket

    def _mint(self, source: WorkerInfo, target: WorkerInfo) -> Ticket:
        return mint_ticket(
            self._secret,
            self._request.request_id,
            source.peer,
            target.peer,
            target.transfer_addresses,
            source_cut=source.layout.cut,
            target_cut=target.layout.cut,
        )


def out_of_time() -> RequestError:
    """What a request ends with that has taken longer than any may."""
    return RequestError("the request took longer than the server lets one take", code="timeout", status=504)
