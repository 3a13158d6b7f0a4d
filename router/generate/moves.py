"""Streams that move: a running sequence goes on at another worker, which has pulled its KV before.

A move has two parts. First the target computes the sequence's tokens so far as a prompt, whose KV it pulls from the
source's prefix cache: all but the last partial block and what has been written since. The source goes on meanwhile.
Then the stream's attempt ends, and another begins at the target, which finds the KV in its own prefix cache and
computes what is missing, a few tokens. Draws depend on seed and position alone, so the tokens are those that the source
would have drawn. The stream stands still for the second part alone. Where the first fails, the source just goes on.
Where a worker dies in the second, the request recovers as it always does.

Streams leave a worker
- that drains, or has left the fleet: all of them, at once;
- whose blocks run out within CROWDED_S: the youngest of the lowest class, before it is preempted;
- that is a prefill worker, as soon as prompts come: they would wait for whole steps of these.

They go where there is room now. A stream moves at most MAX_MOVES times, at least REST_S apart, unless its worker
drains.

To the records of workers and of poisonous requests (router/health) the first part is an attempt like others.
"""

import asyncio
import logging
from collections import Counter
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import msgspec

from twostroke.protocol.clock import Clock
from twostroke.protocol.errors import RequestError, TwostrokeError, WorkerFailed, WorkerLost, loggable
from twostroke.protocol.messages import SendPrefix
from twostroke.protocol.requests import GenerateRequest, Peer, PrefillReply, SamplingParams, about, mint_ticket
from twostroke.protocol.stats import WorkerInfo
from twostroke.router.fleet import Fleet, NoPath
from twostroke.router.request_state import (
    AttemptContext,
    AttemptEnded,
    AttemptLog,
    DecodeFailed,
    DecodeStarted,
    MoveReason,
    Path,
    SuspectRequest,
)
from twostroke.router.routing.chooser import PathChooser
from twostroke.router.routing.workers import DRAINING, KnownWorker
from twostroke.router.token_channels import TokenChannels
from twostroke.router.worker_health import WorkerRecords

_log = logging.getLogger(__name__)

LOOK_S = 0.25
"""Seconds between two looks at the workers that write streams."""
CROWDED_S = 2.0
"""A worker whose streams need all its free blocks within this time is crowded."""
BUSY_SHARE = 0.25
"""Share of a prefill worker's time from which on prompts are said to come."""
MAX_MOVES = 2
REST_S = 1.0
MIN_LEFT = 16
"""Tokens that an answer must have left, at most, to be worth a move."""
MOVE_LIMIT_S = 20.0
"""Seconds after which a first part is given up."""

AT_ONCE: dict[MoveReason, int] = {"drain": 16, "crowded": 1, "prompts": 2}
"""Moves away from one worker at a time, by reason."""


class StreamMoved(TwostrokeError):
    """The attempt ends, since its stream goes on along `path`. No fault: it says so to no client."""

    def __init__(self, path: Path, reason: MoveReason):
        super().__init__(f"the stream goes on at worker {path.decode.peer.worker_id}")
        self.path = path
        self.reason = reason


@dataclass(eq=False)
class RunningStream:
    """A sequence that some worker writes now."""

    request: GenerateRequest  # the template
    sent: Sequence[int]  # all output tokens so far; grows
    suspect: SuspectRequest
    worker: WorkerInfo
    end: Callable[[TwostrokeError], None]  # has its attempt fail
    began: float
    num_moves: int
    num_before: int  # output tokens of earlier attempts: with no others this worker may hold no KV
    move: "asyncio.Task[None] | None" = field(default=None)

    @property
    def is_moving(self) -> bool:
        """Return True while a move, or the rest after one that failed, is under way."""
        return self.move is not None and not self.move.done()

    @property
    def order(self) -> tuple[int, float]:
        """The order in which streams leave a crowded worker."""
        return self.request.promise.priority, -self.began


@dataclass(eq=False)
class StreamMoves:
    """The running streams of one router replica, and their moves."""

    fleet: Fleet
    chooser: PathChooser
    channels: TokenChannels
    records: WorkerRecords
    secret: bytes
    clock: Clock
    draw_id: Callable[[], str]
    is_flexible: bool
    """Prefill workers may write answers."""
    num_moved: Counter[MoveReason] = field(default_factory=Counter, init=False)
    """Streams that went on elsewhere."""
    num_failed: Counter[MoveReason] = field(default_factory=Counter, init=False)
    """Moves whose first part failed."""
    _streams: dict[Peer, dict[RunningStream, None]] = field(default_factory=dict, init=False)  # in order
    _looking: "asyncio.Task[None] | None" = field(default=None, init=False)

    @asynccontextmanager
    async def running(self, stream: RunningStream) -> AsyncIterator[None]:
        """Let a stream move for as long as the context lasts. A move under way has ended when the context has."""
        peer = stream.worker.peer
        self._streams.setdefault(peer, {})[stream] = None
        if self._looking is None:
            self._looking = asyncio.create_task(self._look_forever(), name="moves of streams")
        try:
            yield
        finally:
            del self._streams[peer][stream]
            if not self._streams[peer]:
                del self._streams[peer]
            if not self._streams:
                self._looking.cancel()
                self._looking = None
            if stream.is_moving and stream.move is not None:
                stream.move.cancel()
                await asyncio.wait([stream.move])

    async def _look_forever(self) -> None:
        """Look for streams that had better go on elsewhere."""
        while True:
            await asyncio.sleep(LOOK_S)
            try:
                self.chooser.look()
                for peer in list(self._streams):
                    self._look_at(peer)
            except Exception:
                _log.exception("no stream can be moved; the next look may find how")

    def _look_at(self, peer: Peer) -> None:
        reason = self._reason(self.chooser.find(peer))
        if reason is None:
            return
        now, streams = self.clock(), self._streams[peer]
        under_way = sum(stream.is_moving for stream in streams)
        for stream in sorted(streams, key=lambda one: one.order):
            if under_way >= AT_ONCE[reason]:
                return
            if self._may_move(stream, reason, now):
                stream.move = asyncio.create_task(self._move(stream, reason), name="move of a stream")
                under_way += 1

    def _reason(self, worker: KnownWorker | None) -> MoveReason | None:
        """Return why streams should leave a worker; None: they should not."""
        if worker is None or worker.tier == DRAINING:
            return "drain"
        if worker.role == "prefill" and (worker.queued_tokens() > 0 or worker.prompt_share > BUSY_SHARE):
            return "prompts"
        if worker.decoding > 1 and worker.next_step_s > 0:  # else nobody knows what steps cost
            full_in_s = worker.free_tokens * worker.next_step_s / worker.decoding
            return "crowded" if full_in_s < CROWDED_S else None
        return None

    def _may_move(self, stream: RunningStream, reason: MoveReason, now: float) -> bool:
        if stream.is_moving or len(stream.sent) <= stream.num_before:
            return False
        if reason == "drain":
            return True
        is_long = stream.request.max_tokens - len(stream.sent) >= MIN_LEFT
        return is_long and stream.num_moves < MAX_MOVES and now - stream.began >= REST_S

    async def _move(self, stream: RunningStream, reason: MoveReason) -> None:
        """Have the target compute the sequence so far, and let the stream go on there."""
        extra = about(stream.request.log_context, reason=reason, tokens=len(stream.sent))
        to_prefill, ejected = self.is_flexible and reason != "prompts", self.records.ejected()
        try:
            path = self.chooser.choose_target(
                stream.request, stream.sent, stream.worker, to_prefill=to_prefill, ejected=ejected
            )
        except NoPath:
            return  # there may be room at the next look
        error = await self._try_first_part(stream, path)
        if error is None:
            self.num_moved[reason] += 1
            _log.info("a stream moves to worker %s", path.decode.peer.worker_id, extra=extra)
            stream.end(StreamMoved(path, reason))
        else:
            self.num_failed[reason] += 1
            _log.info("a stream could not be moved: %s", loggable(error), extra=extra)
            await asyncio.sleep(REST_S)

    async def _try_first_part(self, stream: RunningStream, path: Path) -> TwostrokeError | None:
        """Have the target compute the sequence so far. Return what went wrong; None where nothing did."""
        attempt = AttemptContext(path, stream.request, tuple(stream.sent), stream.suspect)
        hold = self.chooser.hold(path, stream.request, stream.sent)
        log = AttemptLog(attempt, (hold, self.records), self.clock)
        error: TwostrokeError | None = None
        try:
            await self.records.await_exclusive_try(stream.suspect, path)
            async with asyncio.timeout(MOVE_LIMIT_S):
                await self._have_computed(stream, path.decode)
            log.emit(DecodeStarted(self.clock()))
        except TwostrokeError as failure:
            error = failure
        except TimeoutError:
            # The source may be to blame as well as the target: it counts against neither.
            error = RequestError(f"it took longer than {MOVE_LIMIT_S:g} s", code="timeout", status=504)
        except Exception as failure:
            _log.exception("the first part of a move failed unexpectedly", extra=about(stream.request.log_context))
            error = WorkerFailed(f"the call failed: {type(failure).__name__}")
        finally:
            if error is not None:
                log.emit(DecodeFailed(error))
            log.emit(AttemptEnded(self.clock(), error, log.has_decoded))
        return error

    async def _have_computed(self, stream: RunningStream, target: WorkerInfo) -> None:
        """Have the target's prefix cache hold the KV of the sequence so far; it pulls what it can."""
        await self.channels.ensure(target)
        request = msgspec.structs.replace(
            stream.request,
            request_id=self.draw_id(),
            router_id=self.channels.peer.worker_id,
            token_ids=(*stream.request.token_ids, *stream.sent),
            sampling=SamplingParams(temperature=0.0),  # the token that it draws is dropped
            grammar="",
        )
        pull = None
        if self.channels.is_connected(stream.worker.peer):
            pull = mint_ticket(
                self.secret,
                request.request_id,
                stream.worker.peer,
                target.peer,
                target.transfer_addresses,
                source_cut=stream.worker.layout.cut,
                target_cut=target.layout.cut,
            )
            order = SendPrefix(pull, request.token_ids, request.cache_salt, request.log_context)
            self.channels.send(stream.worker.peer, order)
        reply = await self._reply_of(target.peer, self.fleet.prefill(target.peer, request, None, pull))
        if reply.event.error is not None:
            raise WorkerFailed(reply.event.error)

    async def _reply_of(self, target: Peer, call: Coroutine[Any, Any, PrefillReply]) -> PrefillReply:
        """Wait for the target's reply. Raises WorkerLost once nobody hears of it: it may have been stopped."""
        replying = asyncio.create_task(call, name="first part of a move")
        try:
            while not (await asyncio.wait([replying], timeout=LOOK_S))[0]:
                if self.channels.is_down(target):
                    raise WorkerLost(f"worker {target.worker_id} can't be reached")
            return replying.result()
        finally:
            replying.cancel()
            await asyncio.wait([replying])
