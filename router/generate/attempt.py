"""One attempt at a request on one pair of workers: read `Attempt.events`.

Everything an attempt opens (two calls, one stream) ends with it, on every path: finish, fault, the client leaving.
Its observers hear what happens on the way (router/request_state.py).

`ScoreAttempt` is an attempt at scoring a prompt: its log-probabilities, its embedding. One worker of either role does
it.
"""

import asyncio
import logging
from collections.abc import AsyncGenerator
from dataclasses import dataclass

from twostroke.protocol.errors import RequestError, TransferFailed, TwostrokeError, WorkerFailed, WorkerLost, loggable
from twostroke.protocol.messages import Cancel, PrefillFailed, SendPrefix
from twostroke.protocol.requests import GenerateRequest, Peer, Ticket, TokenEvent, about, mint_ticket
from twostroke.protocol.stats import WorkerInfo
from twostroke.router.fleet import Fleet
from twostroke.router.generate.config import PipelineConfig
from twostroke.router.request_state import (
    AttemptLog,
    DecodeDone,
    DecodeFailed,
    DecodeStarted,
    FirstToken,
    PrefillDone,
    PrefillEnded,
    PrefillLost,
    PrefillTakenOver,
    PrefixCached,
    PromptScored,
    ScoreDone,
)
from twostroke.router.routing.chooser import PathChooser
from twostroke.router.token_channels import TokenChannels, join_fresh
from twostroke.router.worker_health import WorkerRecords

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class AttemptDeps:
    """Objects that all attempts of a router replica share. `secret` is the cluster's key that signs tickets."""

    fleet: Fleet
    channels: TokenChannels
    secret: bytes
    config: PipelineConfig
    records: WorkerRecords
    chooser: PathChooser


class PrefillMoved(WorkerLost):
    """No KV comes, and another prefill worker had better compute the prompt: the decode worker is not to blame."""


class Attempt:
    """An attempt with its own request id, so that no message of another attempt can be taken for its own."""

    def __init__(self, deps: AttemptDeps, log: AttemptLog, request: GenerateRequest, failed: set[Peer]):
        """Raises WorkerLost without a channel to the decode worker.

        `request` is the attempt's own, with all outputs so far among its tokens. A prefill worker that fails is added
        to `failed`.
        """
        self._deps = deps
        self._channels = deps.channels
        self._config = deps.config
        self._log = log
        self._request = request
        self._failed = failed
        self._path = path = log.attempt.path
        self._decode = path.decode.peer
        self._has_first_token = False
        self._awaits_kv = path.prefill is not None  # and it may still come
        self._takeover: asyncio.Task[None] | None = None  # tells the decode worker that no KV comes
        self._ticket = None if path.prefill is None else self._mint(path.prefill, path.decode)
        self._stream = deps.channels.subscribe(self._decode, request.request_id, max_tokens=request.max_tokens)

    def fail(self, error: TwostrokeError) -> None:
        """Have `events` raise `error` once the reader has what has come already."""
        self._stream.fail(error)

    async def events(self, time_left_s: float) -> AsyncGenerator[TokenEvent, None]:
        """Call both workers at once and yield what follows the tokens sent. Raises WorkerLost or RequestError.

        The consumer adds each event's tokens to those sent before it takes the next. After `time_left_s` the attempt
        fails.
        """
        prefill, sent = self._path.prefill, self._log.attempt.sent
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
                self._note_progress(event)
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
            self._log.emit(DecodeFailed(error))
            raise
        finally:
            timer.cancel()
            self._stream.close()
            await self._end_calls(calls, is_complete=complete)

    async def _end_calls(self, calls: dict[Peer, "asyncio.Task[None]"], *, is_complete: bool) -> None:
        """End both calls, and abort the request at workers that have not finished it: a client's leaving comes here."""
        request_id, prefill = self._request.request_id, self._path.prefill
        for worker, call in calls.items():
            if not (is_complete and call.done()):
                # The channel is quicker than the call, works where the call is stuck, and reaches a prefill
                # worker whose call is over and whose transfer is not.
                self._channels.send(worker, Cancel(request_id))
            call.cancel()
        tasks = list(calls.values())
        if prefill is not None:
            self._channels.unwatch_sending(prefill.peer, request_id)
        if self._takeover is not None:
            self._takeover.cancel()
            tasks.append(self._takeover)
        await asyncio.gather(*tasks, return_exceptions=True)

    def _note_progress(self, event: TokenEvent) -> None:
        """Emit what new tokens say beside themselves."""
        if event.num_cached_tokens is not None and not self._awaits_kv:
            # The reply says it, too, but does not come where a stop string ends the answer here.
            self._log.emit(PrefixCached(event.num_cached_tokens))
        if self._log.has_decoded or not event.tokens:
            return
        if not self._has_first_token:
            self._has_first_token = True
            self._log.emit(FirstToken(self._log.clock()))
        # The first token may be the prefill worker's, which the decode worker merely repeats.
        if event.index + len(event.tokens) > self._request.num_output_tokens_given + self._awaits_kv:
            self._log.emit(DecodeStarted(self._log.clock()))

    async def _call_decode(self) -> None:
        """Run the request on the decode worker; its tokens come by the channel, its failure goes into the stream."""
        stream = self._stream
        try:
            pull = self._request_prefix() if self._path.prefill is None else None
            reply = await self._deps.fleet.decode(self._decode, self._request, self._ticket, pull)
        except TwostrokeError as error:
            stream.fail(error)
            return
        except Exception as error:
            _log.exception("the decode call failed unexpectedly", extra=about(self._request.log_context))
            stream.fail(WorkerFailed(f"the decode call failed: {type(error).__name__}"))
            return
        has_transfer = self._ticket is not None or pull is not None
        self._log.emit(DecodeDone(reply, len(self._request.token_ids), has_transfer))
        if reply.finish_reason is None:
            stream.fail(WorkerFailed("the decode worker cancelled the request"))
        else:  # the reply may overtake the last frame, but not by much
            stream.fail_in(self._config.reply_grace_s, WorkerFailed("the last tokens did not come"))

    async def _call_prefill(self, worker: WorkerInfo) -> None:
        """Compute the prompt on the prefill worker. If that fails, the decode worker is told to compute it.

        The same holds where the KV is not sent, which the worker says apart from its reply, earlier or later. When its
        channel drops the worker counts as lost, and the call is cancelled: a stopped worker's call would hang.
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
            self._deps.records.begin_prefill(self._log.attempt.suspect, worker.peer)
            pull = self._request_prefix()
            reply = await self._deps.fleet.prefill(worker.peer, self._request, self._ticket, pull)
            if reply.event.error is not None:
                raise WorkerFailed(reply.event.error)
        except TwostrokeError as error:
            self._without_prefill(worker.peer, error)
        except Exception as error:
            _log.exception("the prefill call failed unexpectedly", extra=about(self._request.log_context))
            self._without_prefill(worker.peer, WorkerFailed(f"the prefill call failed: {type(error).__name__}"))
        else:
            self._log.emit(PrefillDone(self._log.clock(), reply, len(self._request.token_ids)))
            self._stream.push(reply.event)
        finally:
            self._log.emit(PrefillEnded())

    def _without_prefill(self, worker: Peer, error: TwostrokeError) -> None:
        extra = about(self._request.log_context, error=type(error).__name__)
        _log.warning("the prefill on %s failed: %s", worker.worker_id, loggable(error), extra=extra)
        if self._awaits_kv:  # both the call and the transfer may fail
            self._awaits_kv = False
            self._failed.add(worker)
            self._log.emit(PrefillLost(error))
        if self._takeover is None:
            self._takeover = asyncio.create_task(self._take_over_prefill())

    async def _take_over_prefill(self) -> None:
        """The prefill has failed: tell the decode worker, until it is heard, to compute the prompt.

        Where the decode worker is busy and another prefill worker would be much quicker, the attempt ends for the next
        one. A suspect waits until it may be computed; if it is found to be poison meanwhile, the request fails.
        """
        is_quicker = self._deps.chooser.is_quicker_by_a_pair
        if not self._stream.heard and is_quicker(self._request, self._decode, self._failed):
            self._stream.fail(PrefillMoved("its prefill worker failed, and another one is to compute the prompt"))
            return
        self._log.emit(PrefillTakenOver())
        try:
            await self._deps.records.await_exclusive_decode(self._log.attempt.suspect, self._decode)
        except RequestError as error:
            self._stream.fail(error)
            return
        while not self._stream.heard:
            self._channels.send(self._decode, PrefillFailed(self._request.request_id))
            await asyncio.sleep(self._config.prefill_failed_repeat_s)

    def _request_prefix(self) -> Ticket | None:
        """Have the path's source send what it holds of the prompt, and return the ticket for the worker that pulls.

        Return None without a source, or without a channel to it: the target would wait in vain. A source that holds
        less than was thought sends less, or nothing, and the worker that pulls computes the rest.
        """
        source = self._path.source
        if source is None or not self._channels.is_connected(source.peer):
            return None
        ticket = self._mint(source, self._path.prompt_worker)
        request = self._request
        self._channels.send(source.peer, SendPrefix(ticket, request.token_ids, request.cache_salt, request.log_context))
        return ticket

    def _mint(self, source: WorkerInfo, target: WorkerInfo) -> Ticket:
        return mint_ticket(
            self._deps.secret,
            self._request.request_id,
            source.peer,
            target.peer,
            target.transfer_addresses,
            source_cut=source.layout.cut,
            target_cut=target.layout.cut,
        )


def out_of_time() -> RequestError:
    """Return the error of a request that takes longer than `request_timeout_s`."""
    return RequestError("the request took longer than the server lets one take", code="timeout", status=504)


class ScoreAttempt:
    """An attempt whose result comes with the call's reply; the token channel only tells that the worker lives."""

    def __init__(self, deps: AttemptDeps, log: AttemptLog, request: GenerateRequest):
        """Raises WorkerLost without a channel to the worker."""
        self._channels = deps.channels
        self._fleet = deps.fleet
        self._log = log
        self._request = request
        self._worker = log.attempt.path.decode.peer
        self._stream = deps.channels.subscribe(self._worker, request.request_id, max_tokens=1)

    async def events(self, time_left_s: float) -> AsyncGenerator[TokenEvent, None]:
        """Yield one PromptScored. Raises WorkerLost or RequestError."""
        call = asyncio.create_task(self._call())
        timer = asyncio.get_running_loop().call_later(time_left_s, self._stream.fail, out_of_time())
        try:
            yield await anext(self._stream)
        except (WorkerLost, RequestError) as error:
            self._log.emit(DecodeFailed(error))
            raise
        finally:
            timer.cancel()
            self._stream.close()
            if not call.done():
                self._channels.send(self._worker, Cancel(self._request.request_id))
            call.cancel()
            await asyncio.gather(call, return_exceptions=True)

    async def _call(self) -> None:
        try:
            reply = await self._fleet.score_prompt(self._worker, self._request)
        except TwostrokeError as error:
            self._stream.fail(error)
        except Exception as error:
            _log.exception("the score call failed unexpectedly", extra=about(self._request.log_context))
            self._stream.fail(WorkerFailed(f"the score call failed: {type(error).__name__}"))
        else:
            event = reply.event
            self._log.emit(ScoreDone(self._log.clock(), reply))
            self._stream.push(
                PromptScored(
                    event.request_id,
                    event.index,
                    event.tokens,
                    event.finish_reason,
                    scores=reply.scores,
                    embedding=reply.embedding,
                )
            )
