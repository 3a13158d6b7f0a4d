"""The whole way of one sequence through prefill and decode: read `Pipeline.generate`, then `Attempt.events`.

`Retries` decides whether a request that failed is tried again, and after which pause. A worker that died, is cut off
or leaves on purpose gives its requests back, all at once: each is tried again, whatever the retry budget says, since
no accepted request may be lost to a dead worker, and its load has gone with it. Refusals and failures of workers that
live are bounded by the budget: there, retries are load on top of load. But a request with tokens was accepted, and
waits for a refusing worker's room until its own deadline.

Without a budget, workers that refuse or fail under load would get every request several times, and never recover.
"""

import asyncio
import logging
import random
import secrets
from collections import Counter
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Collection
from contextlib import AbstractAsyncContextManager, aclosing, asynccontextmanager, nullcontext
from typing import assert_never

import msgspec

from twostroke.protocol.clock import Clock
from twostroke.protocol.errors import RequestError, TwostrokeError, WorkerFailed, WorkerLost, loggable
from twostroke.protocol.messages import BlocksChanged, BlocksHeld
from twostroke.protocol.network import Network
from twostroke.protocol.requests import BlockedRequests, GenerateRequest, Peer, TokenEvent, about, left_of
from twostroke.router.fleet import Fleet, NoPath
from twostroke.router.generate.attempt import Attempt, AttemptDeps, PrefillMoved, ScoreAttempt, out_of_time
from twostroke.router.generate.config import PipelineConfig
from twostroke.router.generate.moves import RunningStream, StreamMoved, StreamMoves
from twostroke.router.request_state import (
    AttemptContext,
    AttemptEnded,
    AttemptLog,
    AttemptStarted,
    Path,
    PathKind,
    RequestState,
    StreamMove,
)
from twostroke.router.routing.block_index import BlockIndex, PromptNames
from twostroke.router.routing.chooser import PathChooser
from twostroke.router.routing.workers import FleetView, Hold
from twostroke.router.token_channels import ChannelListener, TokenChannelConfig, TokenChannels
from twostroke.router.worker_health import WorkerRecords, backoff_s

_REFILL_S = 10.0


class RetryBudget:
    """A token bucket: every first attempt adds `retry_budget` of a retry.

    `retry_floor` retries are there at the beginning and come back within ten seconds, so that a server with little
    traffic can retry, too; ten times as many can be saved up.
    """

    def __init__(self, config: PipelineConfig, clock: Clock):
        self._share = config.retry_budget
        self._floor = config.retry_floor
        self._clock = clock
        self._tokens = float(self._floor)
        self._refilled_at = clock()

    def count_first_attempt(self) -> None:
        """A request begins."""
        self._refill()
        self._tokens = min(self._tokens + self._share, max(10.0 * self._floor, 1.0))

    def take(self) -> bool:
        """Count one more retry and return True, if it may be made."""
        self._refill()
        if self._tokens < 1.0:
            return False
        self._tokens -= 1.0
        return True

    def _refill(self) -> None:
        now = self._clock()
        elapsed_s, self._refilled_at = now - self._refilled_at, now
        if self._tokens < self._floor:
            self._tokens = min(self._tokens + elapsed_s * self._floor / _REFILL_S, float(self._floor))


_TRY_ELSEWHERE = (429, 503)
"""Status codes of refusals that are about the worker, not the request."""


class Retries:
    """The retries of one request. `draw` gives numbers from 0 to 1."""

    def __init__(self, config: PipelineConfig, budget: RetryBudget, draw: Callable[[], float]):
        self._config = config
        self._budget = budget
        self._draw = draw
        self._in_a_row = 0

    def pause_s(
        self, error: TwostrokeError, *, has_decoded: bool, decode_failed_before: bool, has_begun: bool
    ) -> float | None:
        """The pause before the next attempt; None: none is made, and the client gets `error`.

        `has_decoded`: the attempt that failed had a token of the decode worker's own. `decode_failed_before`: this
        request's decode worker failed or refused an earlier attempt. `has_begun`: the client has a token."""
        is_refusal = isinstance(error, RequestError)
        is_final = decode_failed_before and not has_begun
        if isinstance(error, RequestError) and (error.status not in _TRY_ELSEWHERE or is_final):
            return None
        is_exempt = is_refusal and has_begun
        self._in_a_row = 1 if has_decoded else self._in_a_row + 1
        if self._in_a_row > self._config.retries:
            if not is_exempt:
                return None
            self._in_a_row = self._config.retries
        if (is_refusal or isinstance(error, WorkerFailed)) and not is_exempt and not self._budget.take():
            return None
        num_pauses = self._in_a_row - (1 if is_refusal else 2)
        if num_pauses < 0:
            return 0.0
        return backoff_s(self._config.retry_first_s, self._config.retry_most_s, num_pauses, self._draw)


_log = logging.getLogger(__name__)

_DEFAULTS = PipelineConfig()
_CHANNEL_DEFAULTS = TokenChannelConfig()


class FleetKnowledge:
    """The workers' numbers (`view`), their blocks in caches and KV tiers, and blocked requests, all fed by `channels`.

    `router` is this replica's id and epoch. Without the policy kv_aware no worker is asked for its blocks.
    """

    def __init__(
        self,
        *,
        network: Network,
        router: Peer,
        clock: Clock,
        config: PipelineConfig = _DEFAULTS,
        channel: TokenChannelConfig = _CHANNEL_DEFAULTS,
    ):
        self.clock = clock
        self.config = config
        self.view = FleetView(clock)
        self.blocks: BlockIndex | None = None
        self.tier_blocks: BlockIndex | None = None
        match config.policy:
            case "kv_aware":
                names = PromptNames()  # a prompt is hashed once for both
                self.blocks, self.tier_blocks = (
                    BlockIndex(clock=clock, max_blocks=config.index_blocks, expected_s=config.expected_s, names=names)
                    for _ in range(2)
                )
            case "least_loaded" | "round_robin":
                pass  # both look at load alone
            case _:
                assert_never(config.policy)
        self.blocked = BlockedRequests(clock, most=config.suspects.max_refused, longest_s=config.suspects.refuse_s)
        self.channels = TokenChannels(
            network=network,
            peer=router,
            clock=clock,
            config=channel,
            listener=ChannelListener(
                on_stats=self.view.on_stats,
                on_connection=self.view.on_connection,
                on_blocks=None if self.blocks is None else self._hear_of_blocks,
            ),
            blocked=self.blocked,
        )

    def _hear_of_blocks(self, worker: Peer, message: BlocksHeld | BlocksChanged) -> bool:
        index = self.tier_blocks if message.is_tier else self.blocks
        assert index is not None
        return index.heard(worker, message)


Admit = Callable[[GenerateRequest, Path, float, bool], None]
"""Called once for each choice, when its path is chosen and its workers' places are held, before any call.

Takes the seconds since it arrived, and whether it follows another choice that was admitted. Raises RequestError to
refuse it.
"""


def admit_all(request: GenerateRequest, path: Path, waited_s: float, follows: bool) -> None:
    """Admit everything."""


class Pipeline:
    """Generates sequences on the fleet's workers.

    `knowledge` is this replica's, `secret` the cluster's key that signs tickets. `draw_id` mints request ids; `draw`
    gives numbers from 0 to 1, for pauses.
    """

    def __init__(
        self,
        *,
        fleet: Fleet,
        knowledge: FleetKnowledge,
        secret: bytes,
        draw_id: Callable[[], str] = lambda: secrets.token_hex(16),
        draw: Callable[[], float] = random.random,
        admit: Admit = admit_all,
    ):
        self._config = config = knowledge.config
        self._clock = clock = knowledge.clock
        self._channels = channels = knowledge.channels
        self._draw_id = draw_id
        self._draw = draw
        self._admit = admit
        self._records = WorkerRecords(
            fleet=fleet,
            channels=channels,
            clock=clock,
            ejection=config.ejection,
            suspects=config.suspects,
            blocked=knowledge.blocked,
            draw=draw,
        )
        self._budget = RetryBudget(config, clock)
        self._chooser = PathChooser(
            workers=fleet.workers,
            follow=channels.follow,
            view=knowledge.view,
            blocks=knowledge.blocks,
            tier_blocks=knowledge.tier_blocks,
            clock=clock,
            config=config,
        )
        self._deps = AttemptDeps(fleet, channels, secret, config, self._records, self._chooser)
        self.paths: Counter[PathKind] = Counter()
        """Paths that choices were admitted on."""
        self.num_tier_reads = 0
        """Choices that were admitted on a path whose prompt is in part read from KV tiers."""
        self.moves = StreamMoves(
            fleet,
            self._chooser,
            channels,
            self._records,
            secret,
            clock,
            draw_id,
            is_flexible=self.is_flexible,
        )

    @property
    def in_flight(self) -> int:
        """Places held at workers: 0 when idle."""
        return self._chooser.in_flight

    @property
    def is_flexible(self) -> bool:
        """Return True where workers write and read whatever their role, and may change it."""
        return self._config.roles == "flexible"

    def ejected(self) -> frozenset[Peer]:
        """Workers that are there, and are left out because they keep failing."""
        return self._records.ejected()

    async def generate(self, state: RequestState) -> AsyncGenerator[TokenEvent, None]:
        """Yield the tokens of a request in order, each index once; the last event has the finish reason.

        A prompt that is only scored yields one event, a PromptScored.

        Every attempt gets its own id and this router's. What the workers' replies tell is in the record when the
        generator has ended. Closing the generator early (always
        `aclose` it) cancels the request on both workers. Raises NoPath (no worker), RequestError (admission or a
        worker refuses the request, it takes workers down, or its time is over), WorkerLost (it lost workers more often
        than `retries` allows).
        """
        state.suspect = suspect = self._records.suspects.open(state.request)
        retries = Retries(self._config, self._budget, self._draw)
        deadline = self._clock() + self._config.request_timeout_s
        failed: set[Peer] = set()
        last = self._clock()
        num_moves = 0
        target: Path | None = None  # the path to which it was just moved
        while True:
            async with self._until(deadline):
                path, hold = await self._find(state, failed, target)
            target = None
            if not state.attempts:
                self._let_in(state, path, hold)
            # The hold first: the next request must see its room at once.
            observers = (hold, state, self._records, self._chooser)
            log = AttemptLog(AttemptContext(path, state.request, state.tokens, suspect), observers, self._clock)
            failure: WorkerLost | RequestError | None = None
            move: StreamMove | None = None
            try:
                log.emit(AttemptStarted(self._clock()))
                async with self._until(deadline):
                    await self._records.await_exclusive_try(suspect, path)
                attempt = self._attempt(log, state, failed)
                events = attempt.events(deadline - self._clock())
                async with self._movable(attempt, log, state, num_moves), aclosing(events):
                    is_first = True
                    async for event in events:
                        now = self._clock()
                        if is_first and len(state.attempts) > 1:
                            _log_resumption(state, now - last)
                        is_first, last = False, now
                        state.add_tokens(event, now)
                        yield event
                return
            except StreamMoved as error:
                target, num_moves, move = error.path, num_moves + 1, StreamMove(error.path.decode, error.reason)
                continue
            except (WorkerLost, RequestError) as error:
                failure = error
                decode = path.decode.peer
                _log.warning(
                    "attempt %d on %s failed: %s",
                    len(state.attempts),
                    decode.worker_id,
                    loggable(error),
                    extra=about(state.log_context, error=type(error).__name__),
                )
                pause_s = retries.pause_s(
                    error,
                    has_decoded=log.has_decoded,
                    decode_failed_before=decode in failed,
                    has_begun=bool(state.tokens),
                )
                if pause_s is None:
                    raise
                if log.has_decoded:
                    failed.clear()  # what others did before that is long ago
                if not isinstance(error, PrefillMoved):
                    failed.add(decode)
            finally:
                log.emit(AttemptEnded(self._clock(), failure, log.has_decoded, move))
            await self._records.suspects.judge(suspect)
            await asyncio.sleep(min(pause_s, deadline - self._clock()))

    def _attempt(self, log: AttemptLog, state: RequestState, failed: set[Peer]) -> Attempt | ScoreAttempt:
        """Return an attempt at the request as it is now, under an id of its own. Raises WorkerLost."""
        request = self._attempt_request(state)
        _log.debug("an attempt begins", extra=about(request.log_context))
        if request.scoring is not None:
            return ScoreAttempt(self._deps, log, request)
        return Attempt(self._deps, log, request, failed)

    def _movable(
        self, attempt: Attempt | ScoreAttempt, log: AttemptLog, state: RequestState, num_moves: int
    ) -> AbstractAsyncContextManager[None]:
        """Let the attempt's stream move to another worker for as long as the context lasts."""
        if not self._config.moves or isinstance(attempt, ScoreAttempt):
            return nullcontext()
        context = log.attempt
        request = msgspec.structs.replace(state.request, log_context=state.log_context)
        worker = context.path.decode
        stream = RunningStream(
            request,
            state.tokens,
            context.suspect,
            worker,
            attempt.fail,
            self._clock(),
            num_moves=num_moves,
            num_before=len(state.tokens),
        )
        return self.moves.running(stream)

    async def _find(self, state: RequestState, failed: Collection[Peer], target: Path | None) -> tuple[Path, Hold]:
        """Return the path of the next attempt, its decode worker reachable, and the hold on its workers.

        It is `target`, where the stream was moved. `failed` are workers that failed the request: one that lost a worker
        waits for another, a new one is refused at once. Raises NoPath.
        """
        if target is not None and self._channels.is_connected(target.decode.peer):
            return target, self._chooser.hold(target, state.request, state.tokens)
        ejected = self._records.ejected()
        path, hold = await self._reachable(state, failed, ejected)
        unreachable = self._records.unreachable_prefill_for(path.decode.peer)
        if path.prefill is None or path.prefill.peer not in unreachable:
            return path, hold
        hold.release()
        return await self._reachable(state, failed, ejected | unreachable)

    async def _reachable(
        self, state: RequestState, failed: Collection[Peer], ejected: Collection[Peer]
    ) -> tuple[Path, Hold]:
        now, request, sent = self._clock(), state.request, state.tokens
        deadline = now + (self._config.retry_wait_s if failed or sent else 0.0)
        while True:
            began = self._clock()
            try:
                path = self._chooser.choose(request, sent, failed, ejected)
            except NoPath:
                if self._clock() >= deadline:
                    raise
                await asyncio.sleep(self._config.retry_poll_s)
                continue
            state.decisions_s.append(self._clock() - began)
            if path.decode.peer in failed and self._clock() < now + self._config.reuse_wait_s:
                await asyncio.sleep(self._config.retry_poll_s)
                continue
            was_down = self._channels.is_down(path.decode.peer)
            # Held before anything is awaited: requests that come together must see each other.
            hold = self._chooser.hold(path, request, sent)
            try:
                await self._channels.ensure(path.decode)
                return path, hold
            except BaseException as error:
                hold.release()
                if not isinstance(error, WorkerLost):
                    raise
                if not was_down:
                    continue  # it is known to be down now, so others come first
                if self._clock() >= deadline:
                    raise NoPath("no decode worker can be reached; try again shortly") from error
            await asyncio.sleep(self._config.retry_poll_s)

    def _let_in(self, state: RequestState, path: Path, hold: Hold) -> None:
        """Ask admission before the first attempt. Raises its refusal at once."""
        try:
            self._admit(state.request, path, self._clock() - state.arrive, state.follows or state.scoring is not None)
        except BaseException:
            hold.release()
            raise
        self.paths[path.kind] += 1
        self.num_tier_reads += path.estimate is not None and path.estimate.tier_read_s > 0
        state.admitted(path, self._clock())
        self._budget.count_first_attempt()

    def _attempt_request(self, state: RequestState) -> GenerateRequest:
        """Return the request as the workers see it now, under an id of its own."""
        request = state.request
        return msgspec.structs.replace(
            request,
            request_id=self._draw_id(),
            router_id=self._channels.peer.worker_id,
            token_ids=(*request.token_ids, *state.tokens),
            promise=left_of(request.promise, self._clock() - state.arrive),
            log_context=state.log_context,
        )

    @asynccontextmanager
    async def _until(self, deadline: float) -> AsyncIterator[None]:
        """Raises RequestError where the block takes longer than the request may."""
        try:
            async with asyncio.timeout(deadline - self._clock()):
                yield
        except TimeoutError as error:
            raise out_of_time() from error


def _log_resumption(state: RequestState, pause_s: float) -> None:
    """Log that the stream stood still for `pause_s`, and goes on."""
    extra = about(state.log_context, tokens=len(state.tokens), pause_s=round(pause_s, 3))
    _log.info("a stream goes on at another attempt", extra=extra)
