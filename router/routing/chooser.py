"""Chooses the workers of an attempt: read `PathChooser.choose`. Nothing here waits or draws random numbers."""

from collections.abc import Callable, Collection, Sequence
from typing import Literal

import msgspec

from twostroke.protocol.clock import Clock
from twostroke.protocol.requests import DecodeReply, GenerateRequest, Peer, PrefillReply
from twostroke.protocol.settings import Count, Interval, Section
from twostroke.protocol.stats import WorkerInfo
from twostroke.router.channels.token_channels import TokenChannels
from twostroke.router.fleet import NoPath, Path, PathEstimate
from twostroke.router.routing.block_index import BlockIndex
from twostroke.router.routing.cheapest_path import (
    PathQuery,
    cheapest_path,
    cheapest_reader,
    leave_out,
    path_by_load,
    with_source,
)
from twostroke.router.routing.in_flight import Hold, Place
from twostroke.router.routing.workers import AVAILABLE, FleetView, KnownWorker

Policy = Literal["kv_aware", "least_loaded", "round_robin"]


class PathConfig(Section):
    """How workers are chosen, and when prefixes are pulled."""

    policy: Policy = "kv_aware"
    """How workers are chosen: by predicted time, counting what each has cached (docs/design/routing.md); by load
    alone; in turn. The other two are there to compare with."""
    decodes_alone: bool = True
    """Whether a decode worker computes a prompt itself where that is predicted to be quicker, though there are prefill
    workers. With false decode workers read prompts only for want of a prefill worker."""
    pulls: bool = True
    """Whether prefixes are pulled from the worker that holds them, where another one is to read the prompt."""
    pull_min_tokens: Count = 128
    """Tokens that a pull must spare to be asked for; what then comes is the workers' to take or decline
    (`min_pull_tokens`). Raise it where the wire is slow and prefill is fast."""
    index_blocks: Count = 2_000_000
    """Blocks of which a router remembers who holds them, at 100 to 150 bytes each; what is more is not known. More for
    fleets with more cache than that."""
    expected_s: Interval = 5.0
    """What a router's own decisions lead to is counted on for so long, and twice as long at most, before the workers
    have told of it."""


FIRST_ANSWER_TOKENS = 100.0  # how long an answer is taken to be before any has ended
ANSWER_WEIGHT = 0.02  # of an answer that has ended, in their mean
_LEAST_S = 1e-3  # until a first token, when paths are compared


class PathChooser:
    """One router replica's. `workers` tells who is there (Fleet.workers).

    Listens to the channels, so it is to be made before those follow any worker.
    """

    def __init__(
        self,
        *,
        workers: Callable[[], Sequence[WorkerInfo]],
        channels: TokenChannels,
        clock: Clock,
        config: PathConfig,
    ):
        self._workers = workers
        self._channels = channels
        self._clock = clock
        self._config = config
        self._min_pull_tokens = config.pull_min_tokens if config.pulls else None
        self._view = FleetView(channels, clock)
        self._cached: BlockIndex | None = None
        if config.policy == "kv_aware":
            self._cached = BlockIndex(clock=clock, max_blocks=config.index_blocks, expected_s=config.expected_s)
        self._trials = CostProbes()
        self._turn = 0
        self._answer_tokens = FIRST_ANSWER_TOKENS
        channels.listener.told = self._view.told
        channels.listener.changed = self._view.changed
        if self._cached is not None:
            channels.listener.blocks = self._cached.heard

    @property
    def in_flight(self) -> int:
        """Places held at workers: 0 when idle."""
        return self._view.in_flight.total()

    def choose(
        self,
        request: GenerateRequest,
        sent: Sequence[int] = (),
        failed: Collection[Peer] = (),
        ejected: Collection[Peer] = (),
    ) -> Path:
        """The path that is best now, for what follows the outputs `sent`; holds nothing. Raises NoPath.

        `failed` are workers that failed the request, `ejected` those that fail many.
        """
        self._follow()
        self._turn += 1
        promise = request.promise
        self._view.classes[promise.class_name] = promise.priority, promise.share
        self._view.refresh()
        self._look_up(request, sent)
        prefill, decode = self._view.of_role["prefill"], self._view.of_role["decode"]
        left_out = leave_out(failed, ejected)
        need = self._need(request, sent)
        if request.reading is not None:
            return cheapest_reader(prefill, decode, need, left_out=left_out, turn=self._turn)
        if self._cached is None or not self._view.knows_costs:
            turn = self._turn if self._config.policy == "round_robin" else None
            path = path_by_load(prefill, decode, need.num_tokens, left_out=left_out, turn=turn)
            if self._cached is None or need.min_pull_tokens is None:
                return path
            return with_source(path, self._view.workers, need.num_tokens, need.min_pull_tokens, left_out)
        best = cheapest_path(
            prefill, decode, need, left_out=left_out, decodes_alone=self._config.decodes_alone, turn=self._turn
        )
        if failed or ejected:
            return best  # requests in trouble try nothing out
        return self._trial(need, best) or best

    def is_quicker_by_a_pair(self, request: GenerateRequest, decode_worker: Peer, failed: Collection[Peer]) -> bool:
        """Whether with some prefill worker the first token comes in half the time that the decode worker needs."""
        self._view.refresh()
        if not self._view.knows_costs:
            return False
        self._look_up(request, ())
        own = [one for one in self._view.of_role["decode"] if one.info.peer == decode_worker]
        prefill, need = self._view.of_role["prefill"], self._need(request, ())
        try:
            alone = cheapest_path([], own, need)
            pair = cheapest_path(prefill, own, need, left_out=leave_out(failed, ()), decodes_alone=False)
        except NoPath:
            return False
        if pair.prefill is None or pair.estimate is None or alone.estimate is None:
            return False
        return 2 * _first_token_s(pair.estimate) < _first_token_s(alone.estimate)

    def hold(self, path: Path, request: GenerateRequest, sent: Sequence[int]) -> Hold:
        """Count the attempt in at its workers."""
        sent = tuple(sent)  # it grows
        num_tokens = len(request.token_ids) + len(sent)
        new_tokens = num_tokens if path.new_tokens is None else path.new_tokens
        class_name = request.promise.class_name
        places = [Place(path.decode.peer, 0 if path.prefill else new_tokens, num_tokens, class_name)]
        if path.prefill is not None:
            places.append(Place(path.prefill.peer, new_tokens, num_tokens, class_name))
            self._trials.worked(path.prefill.peer, new_tokens, self._clock())
        # Only where the prompt is computed: the decode worker has nothing of it until then.
        self._expect(path.reader, request, sent)
        return self._view.in_flight.hold(places, lambda: self._expect(path.decode, request, sent))

    # --- what came of it ---

    def prefilled(self, path: Path, num_tokens: int, reply: PrefillReply) -> None:
        """The path's prefill worker has read its `num_tokens` tokens."""
        if path.estimate is not None:
            took_s = reply.prefill_s - path.estimate.prefill_s
            self._learn_pull(path, num_tokens, reply.num_cached_tokens, took_s)

    def decoded(self, path: Path, num_tokens: int, reply: DecodeReply) -> None:
        """The path's decode worker has read its `num_tokens` tokens itself, and written the answer."""
        if reply.transfer_s > 0:  # else what it was to pull was there already
            self._learn_pull(path, num_tokens, reply.num_cached_tokens, reply.transfer_s)

    def answered(self, path: Path, request: GenerateRequest, sent: Sequence[int]) -> None:
        """The answer `sent` has ended on the path: its decode worker holds all but the last token's KV."""
        self._answer_tokens += ANSWER_WEIGHT * (len(sent) - self._answer_tokens)
        self._expect(path.decode, request, sent[:-1])

    def _need(self, request: GenerateRequest, sent: Sequence[int]) -> PathQuery:
        return PathQuery(
            num_tokens=len(request.token_ids) + len(sent),
            answer_tokens=max(1.0, min(self._answer_tokens, request.max_tokens - len(sent))),
            promise=request.promise,
            classes=self._view.classes,
            min_pull_tokens=self._min_pull_tokens,
        )

    def _follow(self) -> None:
        infos = self._workers()
        self._channels.follow(infos)
        if self._view.follow(infos):
            self._trials.keep(infos, self._clock())
            if self._cached is not None:
                self._cached.keep({info.peer for info in infos})

    def _look_up(self, request: GenerateRequest, sent: Sequence[int]) -> None:
        """Set what each worker has of the prompt."""
        if self._cached is not None:
            tokens = self._cached.held(self._view.infos, request, sent)
            if request.reading is not None and request.reading.needs_all:
                tokens = [0] * len(tokens)
            for worker, held in zip(self._view.workers, tokens, strict=True):
                worker.held = held

    def _trial(self, need: PathQuery, best: Path) -> Path | None:
        """The path by a prefill worker that is due to be tried, if there is one."""
        now = self._clock()
        prefill, decode = self._view.of_role["prefill"], self._view.of_role["decode"]
        worker = self._trials.candidate(prefill, need.num_tokens, now)
        if worker is None or best.estimate is None or best.reader.peer == worker:
            return None
        alone = [one for one in prefill if one.info.peer == worker]
        path = cheapest_path(alone, decode, need, decodes_alone=False, turn=self._turn)
        if path.prefill is None or path.estimate is None:
            return None
        slower = _first_token_s(path.estimate) / max(_first_token_s(best.estimate), _LEAST_S)
        if not self._trials.is_due(worker, need.num_tokens, slower, now):
            return None
        return msgspec.structs.replace(path, is_trial=True)

    def _learn_pull(self, path: Path, num_tokens: int, num_cached_tokens: int, took_s: float) -> None:
        """Of a pull that came, learn how long it took."""
        if path.estimate is None or path.estimate.pull_s == 0 or path.new_tokens is None:
            return
        if num_cached_tokens >= num_tokens - path.new_tokens:
            self._view.rates.pulled(path.reader.peer, expected_s=path.estimate.pull_s, took_s=took_s)

    def _expect(self, worker: WorkerInfo, request: GenerateRequest, sent: Sequence[int]) -> None:
        if self._cached is not None:
            self._cached.expect(worker, request, sent)


def _first_token_s(estimate: PathEstimate) -> float:
    """Until the first token is computed and the second can be."""
    return estimate.ttft_s + estimate.transfer_s


TRY_S = 10.0
_LOOK_S = 1.0  # between two looks for somebody to be tried: they cost more than other decisions
_NUM_LENGTHS = 12  # by powers of 4


class CostProbes:
    """Which idle prefill worker is to be tried against its costs.

    What a worker has fitted may be wrong, or of a time when its machine was slow. If it is thought slow, nothing is
    sent there, and it learns nothing better. So a worker that has had no prompt of some length for long gets one: where
    it is thought as quick as others after `TRY_S`, where it is thought k times as slow after k times that. What trials
    cost the requests that they are made with is then the same little part of all time, however wrong or right the
    costs are.
    """

    def __init__(self) -> None:
        self._last: dict[Peer, list[float]] = {}
        self._due: dict[Peer, list[float]] = {}
        self._looked_at = [0.0] * _NUM_LENGTHS

    def keep(self, infos: Sequence[WorkerInfo], now: float) -> None:
        """These workers are there now. New ones count as if they had just had prompts."""
        peers = [info.peer for info in infos if info.role == "prefill"]
        self._last = {peer: self._last.get(peer) or [now] * _NUM_LENGTHS for peer in peers}
        self._due = {peer: self._due.get(peer) or [now + TRY_S] * _NUM_LENGTHS for peer in peers}

    def worked(self, worker: Peer, num_tokens: int, now: float) -> None:
        """A prompt of which so many tokens are to be computed goes there; it tells of shorter ones, too."""
        if worker in self._last:
            last, due = self._last[worker], self._due[worker]
            for length in range(_length(num_tokens) + 1):
                last[length] = now
                due[length] = now + TRY_S

    def candidate(self, prefill: Sequence[KnownWorker], num_tokens: int, now: float) -> Peer | None:
        """The idle worker that has waited longest for a prompt of this length, if one may be due."""
        length = _length(num_tokens)
        if now - self._looked_at[length] < _LOOK_S:
            return None
        self._looked_at[length] = now
        peers = [one.info.peer for one in prefill if one.requests == 0 and one.tier == AVAILABLE]
        due = [peer for peer in peers if self._due[peer][length] <= now]
        return min(due, key=lambda peer: self._last[peer][length], default=None)

    def is_due(self, worker: Peer, num_tokens: int, slower: float, now: float) -> bool:
        """Whether the candidate, which is thought `slower` times as slow as the best path, is to be tried now."""
        length = _length(num_tokens)
        self._due[worker][length] = self._last[worker][length] + TRY_S * max(1.0, slower)
        return self._due[worker][length] <= now


def _length(num_tokens: int) -> int:
    return min(num_tokens.bit_length() // 2, _NUM_LENGTHS - 1)
