"""One try of a request on one pair of workers: read `Attempt.events`.

Everything an attempt opens (two calls, one stream) ends with it, on every path: finish, fault, the client leaving.
What becomes of its workers on the way is told to those who choose the next ones (`worker_records.py`).
"""

import asyncio
import logging
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass

from twostroke.protocol.clock import Clock
from twostroke.protocol.errors import RequestError, TransferFailed, TwostrokeError, WorkerFailed, WorkerLost
from twostroke.protocol.requests import GenerateRequest, Peer, PrefillReply, Ticket, TokenEvent
from twostroke.protocol.stats import WorkerInfo
from twostroke.router.channels.token_channels import TokenChannels
from twostroke.router.channels.token_stream import join_fresh
from twostroke.router.generate.config import PipelineConfig
from twostroke.router.generate.path_finder import PathFinder, PrefixPulls
from twostroke.router.health.poison import Case
from twostroke.router.health.worker_records import WorkerRecords
from twostroke.router.observe.stages import Stages
from twostroke.router.routing.fleet import Fleet
from twostroke.router.routing.in_flight import Hold
from twostroke.router.routing.policy import Path

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Surroundings:
    """What all attempts of a router replica share."""

    fleet: Fleet
    channels: TokenChannels
    finder: PathFinder
    pulls: PrefixPulls
    records: WorkerRecords
    clock: Clock
    config: PipelineConfig


class Attempt:
    """One try. It has its own request id, so that nothing of another try can be taken for it."""

    def __init__(
        self,
        around: Surroundings,
        *,
        path: Path,
        hold: Hold,
        request: GenerateRequest,
        ticket: Ticket | None,
        case: Case,
        stages: Stages,
        failed: set[Peer],
    ):
        """`request` is this try's own, the outputs so far in its tokens. `failed` gets a prefill worker that fails."""
        self.has_got_on = False
        """Whether the decode worker has drawn a token of its own."""
        self._channels = around.channels
        self._fleet = around.fleet
        self._finder = around.finder
        self._pulls = around.pulls
        self._records = around.records
        self._clock = around.clock
        self._config = around.config
        self._path = path
        self._hold = hold
        self._request = request
        self._ticket = ticket
        self._case = case
        self._stages = stages
        self._failed = failed
        self._decode = path.decode.peer
        self._prefill_failed = asyncio.Event()  # no KV comes from the prefill worker
        # Raises WorkerLost where there is no channel; nothing is open then.
        self._stream = around.channels.subscribe(self._decode, request.request_id, max_tokens=request.max_tokens)

    async def events(self, sent: Sequence[int], time_left_s: float) -> AsyncGenerator[TokenEvent, None]:
        """Call both workers at once and yield what follows `sent`. Raises WorkerLost or RequestError.

        The reader extends `sent` by each event before it asks for the next. After `time_left_s` the attempt fails.
        """
        request_id = self._request.request_id
        prefill = self._path.prefill
        calls = {self._decode: asyncio.create_task(self._call_decode())}
        telling = None
        if prefill is not None:
            calls[prefill.peer] = asyncio.create_task(self._call_prefill(prefill))
            telling = asyncio.create_task(self._tell_of_failed_prefill())
        timer = asyncio.get_running_loop().call_later(time_left_s, self._stream.fail, out_of_time())
        complete = False
        try:
            async for first in self._stream:
                event = join_fresh((first, *self._stream.take_queued()), sent)
                if event is None:
                    continue
                self._note_progress(event)
                yield event
                if event.finish_reason is not None:
                    break
            if self._stream.heard:  # else the first token was the last: the decode worker has nothing to do
                # The calls return about now, and tell how it went.
                await asyncio.wait(calls.values(), timeout=self._config.reply_grace_s)
                complete = calls[self._decode].done()
        except (WorkerLost, RequestError) as error:
            self._records.failed(self._case, self._decode, error)
            raise
        finally:
            timer.cancel()
            self._stream.close()
            for worker, call in calls.items():
                if not (complete and call.done()):
                    # The channel is quicker than the call, works where the call is stuck, and reaches a prefill
                    # worker whose call is over and whose transfer is not.
                    self._channels.cancel(worker, request_id)
                call.cancel()
            tasks = list(calls.values())
            if prefill is not None and telling is not None:
                self._channels.unwatch_sending(prefill.peer, request_id)
                telling.cancel()
                tasks.append(telling)
            await asyncio.gather(*tasks, return_exceptions=True)

    def _note_progress(self, event: TokenEvent) -> None:
        self._hold.prompt_computed()
        now = self._clock()
        stages = self._stages
        if stages.first_token is None and event.tokens:
            stages.first_token = now
        stages.num_output_tokens += len(event.tokens)
        if event.finish_reason is not None:
            stages.finish = now
        self._case.position = event.index + len(event.tokens)
        if not self.has_got_on:
            if self._stream.heard:
                self._records.has_kv(self._case, self._decode)
            # The first token may be the prefill worker's, which the decode worker merely repeats.
            has_kv = self._path.prefill is not None and not self._prefill_failed.is_set()
            own = self._request.num_output_tokens_given + has_kv
            if self._case.position > own:
                self.has_got_on = True
                self._records.got_on(self._case, self._path, self._case.position - 1)

    async def _call_decode(self) -> None:
        """Run the request on the decode worker; its tokens come by the channel, its failure goes into the stream."""
        stream, stages = self._stream, self._stages
        try:
            pull = self._pulls.ask(self._path, self._request) if self._path.prefill is None else None
            reply = await self._fleet.decode(self._decode, self._request, self._ticket, pull)
        except TwostrokeError as error:
            stream.fail(error)
            return
        except Exception as error:
            _log.exception("the decode call of %s failed unexpectedly", self._request.request_id)
            stream.fail(WorkerFailed(f"the decode call failed: {type(error).__name__}"))
            return
        stages.num_preemptions += reply.num_preemptions
        stages.transfer_s = reply.transfer_s if self._ticket is not None or pull is not None else None
        stages.decode_queue_s = reply.queue_s
        if stages.prefill_s is None:  # the prompt was computed there
            stages.num_cached_tokens = min(reply.num_cached_tokens, self._request.num_prompt_tokens)
        if self._path.prefill is None:
            self._finder.decoded(self._path, len(self._request.token_ids), reply)
        if reply.finish_reason is None:
            stream.fail(WorkerFailed("the decode worker cancelled the request"))
        else:  # the reply may overtake the last frame, but not by much
            stream.fail_in(self._config.reply_grace_s, WorkerFailed("the last tokens did not come"))

    async def _call_prefill(self, worker: WorkerInfo) -> None:
        """Run the prompt on the prefill worker. Should that fail, the decode worker is told to do it itself.

        So it is where the KV is not sent: the worker tells that apart from its reply, earlier or later.
        """
        request_id = self._request.request_id
        reply = None

        def not_sent() -> None:
            if self._stream.heard:  # the decode worker needs nothing any more
                return
            is_lost = not self._channels.is_connected(worker.peer)
            why = "is lost" if is_lost else "did not send the KV"
            error = (WorkerLost if is_lost else TransferFailed)(f"{worker.peer.worker_id} {why} of {request_id}")
            _log.warning("%s", error)
            self._without_prefill(worker.peer, error)

        try:
            await self._channels.ensure(worker)
            self._channels.watch_sending(worker.peer, request_id, not_sent)
            self._records.computes(self._case, worker.peer)
            pull = self._pulls.ask(self._path, self._request)
            reply = await self._prefill_or_lose(worker.peer, pull)
            if reply.event.error is not None:
                raise WorkerFailed(reply.event.error)
        except TwostrokeError as error:
            _log.warning("prefill of %s on %s failed: %s", request_id, worker.peer.worker_id, error)
            self._without_prefill(worker.peer, error)
        except Exception as error:
            _log.exception("the prefill call of %s failed unexpectedly", request_id)
            self._without_prefill(worker.peer, WorkerFailed(f"the prefill call failed: {type(error).__name__}"))
        else:
            stages = self._stages
            stages.prefill_queue_s = reply.queue_s
            stages.prefill_s = reply.prefill_s
            stages.num_cached_tokens = min(reply.num_cached_tokens, self._request.num_prompt_tokens)
            self._records.prompt_done(self._case, worker.peer, self._decode)
            self._stream.push(reply.event)
            self._finder.prefilled(self._path, len(self._request.token_ids), reply)
        finally:
            self._hold.release(worker.peer)

    def _without_prefill(self, worker: Peer, error: TwostrokeError) -> None:
        """Have the decode worker told. Harmless when repeated: the call and the transfer may fail both."""
        if self._prefill_failed.is_set():
            return
        if isinstance(error, TransferFailed):
            self._records.pair_failed(worker, self._decode)
        else:
            self._records.failed(self._case, worker, error)
        self._failed.add(worker)
        self._stages.prefill_failures += 1
        self._prefill_failed.set()

    async def _tell_of_failed_prefill(self) -> None:
        """Should the prefill fail, tell the decode worker, until it is heard: it computes the prompt then.

        A suspect waits for its turn there. What it finds out of itself meanwhile, the request fails of.
        """
        await self._prefill_failed.wait()
        try:
            await self._records.may_compute(self._case, self._decode)
        except RequestError as error:
            self._stream.fail(error)
            return
        while not self._stream.heard:
            self._channels.prefill_failed(self._decode, self._request.request_id)
            await asyncio.sleep(self._config.prefill_failed_repeat_s)

    async def _prefill_or_lose(self, worker: Peer, pull: Ticket | None) -> PrefillReply:
        """The call's reply; WorkerLost with the channel, since the call of a stopped worker just hangs."""
        call = asyncio.create_task(self._fleet.prefill(worker, self._request, self._ticket, pull))
        loss = asyncio.create_task(self._channels.outlive(worker))
        try:
            await asyncio.wait((call, loss), return_when=asyncio.FIRST_COMPLETED)
            if not call.done():
                raise WorkerLost("its token channel dropped")
            return call.result()
        finally:
            call.cancel()
            loss.cancel()
            await asyncio.gather(call, loss, return_exceptions=True)


def out_of_time() -> RequestError:
    """What a request ends with that has taken longer than any may."""
    return RequestError("the request took longer than the server lets one take", code="timeout", status=504)
