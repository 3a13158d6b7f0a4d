"""Chooses the workers of an attempt: read `PathChooser.choose`. Nothing here waits or draws random numbers."""

from collections.abc import Callable, Collection, Sequence
from typing import Literal

import msgspec

from twostroke.protocol.clock import Clock
from twostroke.protocol.requests import GenerateRequest, Peer
from twostroke.protocol.settings import Count, Interval, Section
from twostroke.protocol.stats import WorkerInfo
from twostroke.router.fleet import NoPath, Path, PathEstimate
from twostroke.router.request_state import AttemptContext, AttemptEnded, AttemptEvent, DecodeDone, PrefillDone
from twostroke.router.routing.block_index import BlockIndex
from twostroke.router.routing.cheapest_path import (
    PathQuery,
    cheapest_path,
    cheapest_prefill,
    cheapest_target,
    leave_out,
    path_by_load,
    with_source,
)
from twostroke.router.routing.in_flight import Hold, Place
from twostroke.router.routing.workers import AVAILABLE, FleetView, KnownWorker

Policy = Literal["kv_aware", "least_loaded", "round_robin"]
Roles = Literal["flexible", "fixed"]


class PathConfig(Section):
    """The choice of workers, and pulls of prefixes."""

    policy: Policy = "kv_aware"
    """Policy by which workers are chosen: by predicted time and cached tokens (docs/design/routing.md); by load
    alone; in turn. The other two are there to compare with."""
    decodes_alone: bool = True
    """A decode worker computes a prompt itself where that is predicted to be quicker, though there are prefill workers.
    With false decode workers compute prompts only for want of a prefill worker."""
    roles: Roles = "flexible"
    """`flexible`: a prefill worker also writes answers, where that is predicted to be quicker, as where it is idle and
    the KV has a long way, or where decode workers have no room. `fixed`: it only computes prompts."""
    pulls: bool = True
    """Prefixes are pulled from the worker that holds them, where another one is to compute the prompt."""
    pull_min_tokens: Count = 128
    """Tokens that a pull must spare to be asked for; what then comes is the workers' to take or decline
    (`min_pull_tokens`). Raise it where the wire is slow and prefill is fast."""
    index_blocks: Count = 2_000_000
    """Blocks of which a router remembers who holds them, at 100 to 150 bytes each; what is more is not known. As many
    again are remembered of workers' KV tiers. More for fleets with more cache, or larger tiers, than that."""
    expected_s: Interval = 5.0
    """Time for which a router counts on the outcome of its own decisions before workers report it; at most twice as
    long."""


FIRST_ANSWER_TOKENS = 100.0
"""Expected length of an answer before any has ended."""
ANSWER_WEIGHT = 0.02
"""Weight of an answer that has ended in the mean length."""
_LEAST_S = 1e-3
"""Least time to first token, in seconds, when paths are compared."""


class PathChooser:
    """Chooses for one router replica. `workers` returns the fleet's workers now; `follow` opens channels to them.

    `view`, `blocks` and `tier_blocks` (of the workers' KV tiers) are kept up to date by the channels. Without `blocks`
    no worker's cache is known, without `tier_blocks` no worker's tiers.
    """

    def __init__(
        self,
        *,
        workers: Callable[[], Sequence[WorkerInfo]],
        follow: Callable[[Sequence[WorkerInfo]], None],
        view: FleetView,
        blocks: BlockIndex | None,
        clock: Clock,
        config: PathConfig,
        tier_blocks: BlockIndex | None = None,
    ):
        self._workers = workers
        self._follow_workers = follow
        self._clock = clock
        self._config = config
        self._min_pull_tokens = config.pull_min_tokens if config.pulls else None
        self._view = view
        self._cached = blocks
        self._in_tiers = tier_blocks
        self._cost_probes = CostProbes()
        self._rotation = 0
        self._answer_tokens = FIRST_ANSWER_TOKENS

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
        self._rotation += 1
        promise = request.promise
        self._view.classes[promise.class_name] = promise.priority, promise.share
        self._view.refresh()
        self._look_up(request, sent)
        prefill, decode = self._view.of_role["prefill"], self._view.of_role["decode"]
        left_out = leave_out(failed, ejected)
        query = self._query(request, sent)
        if request.scoring is not None:
            return cheapest_prefill(prefill, decode, query, left_out=left_out, rotation=self._rotation)
        if self._cached is None or not self._view.knows_costs:
            rotation = self._rotation if self._config.policy == "round_robin" else None
            path = path_by_load(
                prefill,
                decode,
                query.num_tokens,
                left_out=left_out,
                prefill_decodes=self._config.roles == "flexible",
                rotation=rotation,
            )
            if self._cached is None or query.min_pull_tokens is None:
                return path
            return with_source(path, self._view.workers, query.num_tokens, query.min_pull_tokens, left_out)
        best = cheapest_path(
            prefill,
            decode,
            query,
            left_out=left_out,
            decodes_alone=self._config.decodes_alone,
            prefill_decodes=self._config.roles == "flexible",
            rotation=self._rotation,
        )
        if failed or ejected:
            return best  # requests in trouble try nothing out
        return self._cost_probe(query, best) or best

    def is_quicker_by_a_pair(self, request: GenerateRequest, decode_worker: Peer, failed: Collection[Peer]) -> bool:
        """Return whether some prefill worker gives the first token in half the time that the decode worker needs."""
        self._view.refresh()
        if not self._view.knows_costs:
            return False
        self._look_up(request, ())
        own = [one for one in self._view.of_role["decode"] if one.info.peer == decode_worker]
        prefill, query = self._view.of_role["prefill"], self._query(request, ())
        try:
            alone = cheapest_path([], own, query)
            pair = cheapest_path(prefill, own, query, left_out=leave_out(failed, ()), decodes_alone=False)
        except NoPath:
            return False
        if pair.prefill is None or pair.estimate is None or alone.estimate is None:
            return False
        return 2 * _first_token_s(pair.estimate) < _first_token_s(alone.estimate)

    def look(self) -> None:
        """Take in what is known of the fleet now."""
        self._follow()
        self._view.refresh()

    def find(self, worker: Peer) -> KnownWorker | None:
        """Return what was known of a worker at the last look; None where it had left the fleet."""
        return self._view.find(worker)

    def choose_target(
        self,
        request: GenerateRequest,
        sent: Sequence[int],
        source: WorkerInfo,
        *,
        to_prefill: bool,
        ejected: Collection[Peer] = (),
    ) -> Path:
        """Return the path of a running sequence that leaves `source`: the other worker with room that is quickest.

        It is a decode worker or, with `to_prefill`, perhaps a prefill worker. Raises NoPath where none has room now.
        """
        self._follow()
        self._view.refresh()
        workers = [*self._view.of_role["decode"], *(self._view.of_role["prefill"] if to_prefill else ())]
        query = self._query(request, sent)
        left_out = {source.peer, *ejected}
        target = cheapest_target([one for one in workers if one.info.peer not in left_out], query, source)
        return Path(None, target.info, new_tokens=target.info.layout.block_size, is_at_prefill=target.role == "prefill")

    def hold(self, path: Path, request: GenerateRequest, sent: Sequence[int]) -> Hold:
        """Count the attempt in at its workers."""
        sent = tuple(sent)  # it grows
        num_tokens = len(request.token_ids) + len(sent)
        new_tokens = num_tokens if path.new_tokens is None else path.new_tokens
        class_name = request.promise.class_name
        places = [Place(path.decode.peer, 0 if path.prefill else new_tokens, num_tokens, class_name)]
        if path.prefill is not None:
            places.append(Place(path.prefill.peer, new_tokens, num_tokens, class_name, is_prefill_only=True))
            self._cost_probes.worked(path.prefill.peer, new_tokens, self._clock())
        # Only where the prompt is computed: the decode worker has nothing of it until then.
        self._expect(path.prompt_worker, request, sent)
        # Of states the last one alone is sent, which is no prefix's.
        holder = path.prompt_worker if path.decode.layout.state_numbers else path.decode
        return self._view.in_flight.hold(places, lambda: self._expect(holder, request, sent))

    def on_event(self, attempt: AttemptContext, event: AttemptEvent) -> None:
        """Learn how long pulls and answers are, and where the KV of an answer lies."""
        path = attempt.path
        match event:
            case PrefillDone(_, reply, num_tokens) if path.estimate is not None:
                took_s = reply.prefill_s - path.estimate.prefill_s
                self._learn_pull(path, num_tokens, reply.num_cached_tokens, took_s)
            case DecodeDone(reply, num_tokens) if path.prefill is None and reply.transfer_s > 0:
                # Without a transfer the prefix that was to be pulled was there already.
                self._learn_pull(path, num_tokens, reply.num_cached_tokens, reply.transfer_s)
            case AttemptEnded(error=error, has_decoded=True, move=move):
                sent = attempt.sent  # the decode worker holds the KV of all but the last token
                if error is None and move is None:
                    self._answer_tokens += ANSWER_WEIGHT * (len(sent) - self._answer_tokens)
                self._expect(path.decode, attempt.request, sent[:-1])

    def _query(self, request: GenerateRequest, sent: Sequence[int]) -> PathQuery:
        return PathQuery(
            num_tokens=len(request.token_ids) + len(sent),
            answer_tokens=max(1.0, min(self._answer_tokens, request.max_tokens - len(sent))),
            promise=request.promise,
            classes=self._view.classes,
            min_pull_tokens=self._min_pull_tokens,
            most_tokens=request.num_prompt_tokens + request.max_tokens,
        )

    def _follow(self) -> None:
        infos = self._workers()
        self._follow_workers(infos)
        if self._view.follow(infos):
            self._cost_probes.keep(infos, self._clock())
            for index in (self._cached, self._in_tiers):
                if index is not None:
                    index.keep({info.peer for info in infos})

    def _look_up(self, request: GenerateRequest, sent: Sequence[int]) -> None:
        """Set what each worker has of the prompt, in its cache and in its tiers."""
        if self._cached is not None:
            tokens = self._cached.cached_tokens(self._view.infos, request, sent)
            if request.scoring is not None and request.scoring.needs_all:
                tokens = [0] * len(tokens)
            for worker, cached_tokens in zip(self._view.workers, tokens, strict=True):
                worker.cached_tokens = cached_tokens
        if self._in_tiers is not None and self._view.has_tiers:
            tiered = [one for one in self._view.workers if one.tier_token_s]
            tokens = self._in_tiers.cached_tokens([one.info for one in tiered], request, sent)
            if request.scoring is not None and request.scoring.needs_all:
                tokens = [0] * len(tokens)
            for worker, tier_tokens in zip(tiered, tokens, strict=True):
                worker.tier_tokens = tier_tokens

    def _cost_probe(self, query: PathQuery, best: Path) -> Path | None:
        """The path by a prefill worker that is due to be tried, if there is one."""
        now = self._clock()
        prefill, decode = self._view.of_role["prefill"], self._view.of_role["decode"]
        worker = self._cost_probes.candidate(prefill, query.num_tokens, now)
        if worker is None or best.estimate is None or best.prompt_worker.peer == worker:
            return None
        alone = [one for one in prefill if one.info.peer == worker]
        path = cheapest_path(alone, decode, query, decodes_alone=False, rotation=self._rotation)
        if path.prefill is None or path.estimate is None:
            return None
        slower = _first_token_s(path.estimate) / max(_first_token_s(best.estimate), _LEAST_S)
        if not self._cost_probes.is_due(worker, query.num_tokens, slower, now):
            return None
        return msgspec.structs.replace(path, is_cost_probe=True)

    def _learn_pull(self, path: Path, num_tokens: int, num_cached_tokens: int, took_s: float) -> None:
        """Learn how long a pull that came took."""
        if path.estimate is None or path.estimate.pull_s == 0 or path.new_tokens is None:
            return
        if num_cached_tokens >= num_tokens - path.new_tokens:
            self._view.rates.pulled(path.prompt_worker.peer, expected_s=path.estimate.pull_s, took_s=took_s)

    def _expect(self, worker: WorkerInfo, request: GenerateRequest, sent: Sequence[int]) -> None:
        if self._cached is not None:
            self._cached.expect(worker, request, sent)


def _first_token_s(estimate: PathEstimate) -> float:
    """Return the seconds until the first token is computed and the second can be."""
    return estimate.ttft_s + estimate.transfer_s


PROBE_AFTER_S = 10.0
"""Idle seconds after which a worker's costs are checked by a prompt."""
_LOOK_S = 1.0
"""Seconds between two looks for a worker to probe, which cost more than other decisions."""
_NUM_LENGTHS = 12
"""Classes of prompt lengths, by powers of 4."""


class CostProbes:
    """Picks the idle prefill worker that gets a request to check its costs.

    What a worker has fitted may be wrong, or of a time when its machine was slow. If it is thought slow, nothing is
    sent there, and it learns nothing better. So a worker that has had no prompt of some length for long gets one:
    where it is thought as quick as others after `PROBE_AFTER_S`, where it is thought k times as slow after k times
    that. What probes cost the requests that they are made with is then the same little part of all time, however
    wrong or right the costs are."""

    def __init__(self) -> None:
        self._last: dict[Peer, list[float]] = {}
        self._due: dict[Peer, list[float]] = {}
        self._looked_at = [0.0] * _NUM_LENGTHS

    def keep(self, infos: Sequence[WorkerInfo], now: float) -> None:
        """These workers are there now. New ones count as if they had just had prompts."""
        peers = [info.peer for info in infos]
        self._last = {peer: self._last.get(peer) or [now] * _NUM_LENGTHS for peer in peers}
        self._due = {peer: self._due.get(peer) or [now + PROBE_AFTER_S] * _NUM_LENGTHS for peer in peers}

    def worked(self, worker: Peer, num_tokens: int, now: float) -> None:
        """A prompt of which so many tokens are to be computed goes there; it tells of shorter ones, too."""
        if worker in self._last:
            last, due = self._last[worker], self._due[worker]
            for length in range(_length(num_tokens) + 1):
                last[length] = now
                due[length] = now + PROBE_AFTER_S

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
        """Return whether the candidate, thought `slower` times as slow as the best path, is to be tried now."""
        length = _length(num_tokens)
        self._due[worker][length] = self._last[worker][length] + PROBE_AFTER_S * max(1.0, slower)
        return self._due[worker][length] <= now


def _length(num_tokens: int) -> int:
    return min(num_tokens.bit_length() // 2, _NUM_LENGTHS - 1)
