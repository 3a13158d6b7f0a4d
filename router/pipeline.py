"""The whole way of one sequence through prefill and decode: read `Pipeline.generate` and `Pipeline._attempt`.

Everything an attempt opens (two calls, one stream) ends with it, on every path: finish, fault, the client leaving.
"""

import asyncio
import logging
import secrets
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field

import msgspec

from protocol.clock import Clock
from protocol.errors import RequestError, TwostrokeError, WorkerLost
from protocol.requests import GenerateRequest, PrefillReply, TokenEvent, left_of
from protocol.stats import WorkerInfo
from protocol.tickets import Peer, Ticket, mint_ticket
from router.config import PipelineConfig
from router.fleet import Fleet
from router.in_flight import Hold
from router.path_finder import PathFinder
from router.policy import Path
from router.prefix_pulls import PrefixPulls
from router.stages import Stages
from router.token_channels import TokenChannels
from router.token_stream import TokenStream, join_fresh

__all__ = ["Pipeline", "PipelineConfig"]

_log = logging.getLogger(__name__)

_DEFAULTS = PipelineConfig()
_TRY_ELSEWHERE = (429, 503)  # refusals that speak of the worker, not of the request

Admit = Callable[[GenerateRequest, Path, Stages], None]
"""Told of each sequence once, when its path is chosen and its workers' places are held, before any call.

Raises RequestError to refuse it.
"""


def admit_all(request: GenerateRequest, path: Path, stages: Stages) -> None:
    """Where nothing is ever refused."""


@dataclass(frozen=True)
class _Attempt:
    """One try of a request: its own id, so that nothing of another try can be taken for it."""

    path: Path
    request: GenerateRequest
    ticket: Ticket | None
    stream: TokenStream
    hold: Hold
    stages: Stages
    prefill_failed: asyncio.Event = field(default_factory=asyncio.Event)  # no KV comes from the prefill worker

    @property
    def request_id(self) -> str:
        return self.request.request_id

    @property
    def decode(self) -> Peer:
        return self.path.decode.peer


class Pipeline:
    """Generates sequences on the fleet's workers.

    `secret` is the cluster's, to sign tickets; `router` this replica's id and epoch; `draw_id` mints request ids.
    """

    def __init__(
        self,
        *,
        fleet: Fleet,
        channels: TokenChannels,
        secret: bytes,
        clock: Clock,
        router: Peer,
        config: PipelineConfig = _DEFAULTS,
        draw_id: Callable[[], str] = lambda: secrets.token_hex(16),
        admit: Admit = admit_all,
    ):
        self._fleet = fleet
        self._channels = channels
        self._secret = secret
        self._clock = clock
        self._router = router
        self._config = config
        self._draw_id = draw_id
        self._admit = admit
        self._pulls = PrefixPulls(channels=channels, secret=secret, config=config)
        self._finder = PathFinder(fleet=fleet, channels=channels, pulls=self._pulls, clock=clock, config=config)

    @property
    def in_flight(self) -> int:
        """Places held at workers: 0 when idle."""
        return self._finder.in_flight

    async def generate(self, request: GenerateRequest, stages: Stages) -> AsyncGenerator[TokenEvent, None]:
        """Yield the tokens of `request` in order, each index once; the last event has the finish reason.

        `request` is a template: every attempt gets its own id and this router's. `stages` is filled in on the way;
        what the workers' replies tell is complete when the generator has ended. Closing the generator early (always
        `aclose` it) cancels the request on both workers. Raises NoPath (nobody there), RequestError (admission or a
        worker refuses the request), WorkerLost (lost workers more often than `retries` allows).
        """
        sent: list[int] = []
        failed: set[Peer] = set()
        while True:
            path, hold = await self._finder.find(request, sent, failed)
            if stages.attempts == 0:
                try:
                    self._admit(request, path, stages)
                except BaseException:
                    hold.release()
                    raise
            stages.begin_attempt()
            try:
                async with aclosing(self._attempt(path, hold, request, sent, failed, stages)) as events:
                    async for event in events:
                        sent.extend(token.token_id for token in event.tokens)
                        yield event
                return
            except (WorkerLost, RequestError) as error:
                _log.warning("attempt %d on %s failed: %s", stages.attempts, path.decode.peer.worker_id, error)
                refused_for_good = isinstance(error, RequestError) and (
                    error.status not in _TRY_ELSEWHERE or path.decode.peer in failed
                )
                if refused_for_good or stages.attempts > self._config.retries:
                    raise
                failed.add(path.decode.peer)
            finally:
                hold.release()

    async def _attempt(
        self,
        path: Path,
        hold: Hold,
        request: GenerateRequest,
        sent: Sequence[int],
        failed: set[Peer],
        stages: Stages,
    ) -> AsyncGenerator[TokenEvent, None]:
        """One try: call both workers at once and yield what follows `sent`. Raises WorkerLost to try elsewhere.

        The reader extends `sent` by each event before it asks for the next.
        """
        tried = msgspec.structs.replace(
            request,
            request_id=self._draw_id(),
            router_id=self._router.worker_id,
            token_ids=(*request.token_ids, *sent),
            promise=left_of(request.promise, self._clock() - stages.arrive),
        )
        ticket = self._mint(path, tried.request_id)
        stream = self._channels.subscribe(path.decode.peer, tried.request_id, max_tokens=request.max_tokens)
        attempt = _Attempt(path, tried, ticket, stream, hold, stages)
        calls = {path.decode.peer: asyncio.create_task(self._call_decode(attempt))}
        telling = None
        if path.prefill is not None:
            calls[path.prefill.peer] = asyncio.create_task(self._call_prefill(attempt, path.prefill, failed))
            telling = asyncio.create_task(self._tell_of_failed_prefill(attempt))
        complete = False
        try:
            async for first in stream:
                event = join_fresh((first, *stream.take_queued()), sent)
                if event is None:
                    continue
                self._stamp(stages, event)
                yield event
                if event.finish_reason is not None:
                    break
            if stream.heard:  # else the first token was the last: the decode worker has nothing to do
                # The calls return about now, and tell how it went.
                await asyncio.wait(calls.values(), timeout=self._config.reply_grace_s)
                complete = calls[path.decode.peer].done()
        finally:
            stream.close()
            for worker, call in calls.items():
                if not (complete and call.done()):
                    # The channel is quicker than the call, works where the call is stuck, and reaches a prefill
                    # worker whose call is over and whose transfer is not.
                    self._channels.cancel(worker, tried.request_id)
                call.cancel()
            tasks = list(calls.values())
            if path.prefill is not None and telling is not None:
                self._channels.unwatch_sending(path.prefill.peer, tried.request_id)
                telling.cancel()
                tasks.append(telling)
            await asyncio.gather(*tasks, return_exceptions=True)
            if stream.heard:
                computed = (*request.token_ids, *sent)[:-1]  # nobody computes the last token's KV
                self._pulls.remember(path.decode.peer, computed, request.cache_salt)

    async def _call_decode(self, attempt: _Attempt) -> None:
        """Run the request on the decode worker; its tokens come by the channel, its failure goes into the stream."""
        try:
            reply = await self._fleet.decode(attempt.decode, attempt.request, attempt.ticket)
        except TwostrokeError as error:
            attempt.stream.fail(error)
            return
        except Exception as error:
            _log.exception("the decode call of %s failed unexpectedly", attempt.request_id)
            attempt.stream.fail(WorkerLost(f"the decode call failed: {type(error).__name__}"))
            return
        stages = attempt.stages
        stages.num_preemptions += reply.num_preemptions
        stages.transfer_s = reply.transfer_s if attempt.ticket is not None else None
        stages.decode_queue_s = reply.queue_s
        if stages.prefill_s is None:  # the prompt was computed there
            stages.num_cached_tokens = min(reply.num_cached_tokens, attempt.request.num_prompt_tokens)
        if reply.finish_reason is None:
            attempt.stream.fail(WorkerLost("the decode worker cancelled the request"))
        else:  # the reply may overtake the last frame, but not by much
            attempt.stream.fail_in(self._config.reply_grace_s, WorkerLost("the last tokens did not come"))

    async def _call_prefill(self, attempt: _Attempt, worker: WorkerInfo, failed: set[Peer]) -> None:
        """Run the prompt on the prefill worker. Should that fail, the decode worker is told to do it itself.

        So it is where the KV is not sent: the worker tells that apart from its reply, earlier or later.
        """
        reply = None

        def not_sent() -> None:
            if not attempt.stream.heard:  # else the decode worker needs nothing any more
                _log.warning("%s did not send the KV of %s", worker.peer.worker_id, attempt.request_id)
                self._prefill_failed(attempt, worker.peer, failed)

        try:
            await self._channels.ensure(worker)
            self._channels.watch_sending(worker.peer, attempt.request_id, not_sent)
            pull = self._pulls.ask(attempt.path, attempt.request)
            reply = await self._prefill_or_lose(attempt, worker.peer, pull)
        except TwostrokeError as error:
            _log.warning("prefill of %s on %s failed: %s", attempt.request_id, worker.peer.worker_id, error)
        except Exception:
            _log.exception("the prefill call of %s failed unexpectedly", attempt.request_id)
        finally:
            attempt.hold.release(worker.peer)
        stages = attempt.stages
        if reply is not None and reply.event.error is None:
            stages.prefill_queue_s = reply.queue_s
            stages.prefill_s = reply.prefill_s
            stages.num_cached_tokens = min(reply.num_cached_tokens, attempt.request.num_prompt_tokens)
            attempt.stream.push(reply.event)
            self._pulls.remember(worker.peer, attempt.request.token_ids, attempt.request.cache_salt)
            return
        self._prefill_failed(attempt, worker.peer, failed)

    def _prefill_failed(self, attempt: _Attempt, worker: Peer, failed: set[Peer]) -> None:
        """Have the decode worker told. Harmless when repeated: the call and the transfer may fail both."""
        if not attempt.prefill_failed.is_set():
            failed.add(worker)
            attempt.stages.prefill_failures += 1
            attempt.prefill_failed.set()

    async def _tell_of_failed_prefill(self, attempt: _Attempt) -> None:
        """Should the prefill fail, tell the decode worker, until it is heard."""
        await attempt.prefill_failed.wait()
        while not attempt.stream.heard:
            self._channels.prefill_failed(attempt.decode, attempt.request_id)
            await asyncio.sleep(self._config.prefill_failed_repeat_s)

    async def _prefill_or_lose(self, attempt: _Attempt, worker: Peer, pull: Ticket | None) -> PrefillReply:
        """The call's reply; WorkerLost with the channel, since the call of a stopped worker just hangs."""
        call = asyncio.create_task(self._fleet.prefill(worker, attempt.request, attempt.ticket, pull))
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

    def _mint(self, path: Path, request_id: str) -> Ticket | None:
        if path.prefill is None:
            return None
        return mint_ticket(
            self._secret,
            request_id,
            path.prefill.peer,
            path.decode.peer,
            path.decode.transfer_addresses,
            source_ranks=path.prefill.layout.tp_size,
        )

    def _stamp(self, stages: Stages, event: TokenEvent) -> None:
        now = self._clock()
        if stages.first_token is None and event.tokens:
            stages.first_token = now
        stages.num_output_tokens += len(event.tokens)
        if event.finish_reason is not None:
            stages.finish = now
