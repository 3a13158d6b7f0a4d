"""The choice of a request's path: by predicted time, by load, or in turn. Pure.

docs/design/routing.md has the formulas. The costs of the prompt's worker and of the decode worker add up, so the
best of each is looked for, never the best of all pairs. What couples the two, that prefill hides the transfer, is
settled with the chosen prefill worker's time.

Everything asks of a worker how much of the prompt it has (`KnownWorker.cached_tokens`), and how much its KV tiers have
(`tier_tokens`), both set for each decision.

`PathChooser.choose` chooses the workers of an attempt. Nothing here waits or draws random numbers.
"""

import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Literal, NamedTuple, TypeVar

import msgspec

from twostroke.protocol.clock import Clock
from twostroke.protocol.kv_layout import incompatibility
from twostroke.protocol.requests import GenerateRequest, Peer, Promise
from twostroke.protocol.settings import Count, Interval, Section
from twostroke.protocol.stats import WorkerInfo
from twostroke.router.fleet import NoPath
from twostroke.router.request_state import (
    AttemptContext,
    AttemptEnded,
    AttemptEvent,
    DecodeDone,
    Path,
    PathEstimate,
    PrefillDone,
)
from twostroke.router.routing.block_index import BlockIndex
from twostroke.router.routing.workers import (
    AVAILABLE,
    DRAINING,
    EJECTED,
    UNWELCOME,
    Classes,
    FleetView,
    Hold,
    KnownWorker,
    Place,
)

HOP_S = 0.002
"""Seconds of any transfer, however short: offer, grant, commit and its answer."""

MIN_PROMPT_SHARE, MOST_PROMPT_SHARE = 0.05, 0.95
"""Bounds of the share of a prefill worker's time that prompts are expected to take while an answer is written there.
The first makes a pair the choice where it costs little: its stream waits for no prompt."""

BESIDE = 0.8
"""Part of its speed that a decode worker is taken to lose while a prefill worker that shares its CPU or GPU computes a
prompt. On two lent cores (mixed prompts, 32 streams) 0.4 made 1.11 of the tokens/s of one worker with both cores and
1.55 of its time to the first token, 0.9 made 1.00 and 0.77."""

_EQUAL = 0.05
"""Costs within this part of the least count as equal, and load decides: fitted costs are no better than that."""


LeftOut = Mapping[Peer, int]
"""Tier of each worker that is left out of a choice, or used only if no better worker exists."""

NOBODY: LeftOut = {}

T = TypeVar("T")


class PathQuery(NamedTuple):
    """The needs of a request that decide its path."""

    num_tokens: int  # of the prompt, and of what was sent of the answer
    answer_tokens: float  # that are still to come, about
    promise: Promise
    classes: Classes
    min_pull_tokens: int | None  # what a pull must spare; None: nothing is pulled
    most_tokens: int = 0  # of the prompt and the longest answer


class PrefillCost(msgspec.Struct, frozen=True, gc=False):
    """The cost of the prompt on a worker of either role in the cheapest way: with a pull, a tier's read, or neither."""

    worker: KnownWorker
    total_s: float  # until the first token, and what others wait for it, added up
    queue_s: float
    pull_s: float  # 0: nothing is pulled
    prefill_s: float
    new_tokens: int  # to be computed
    tier_read_s: float = 0.0  # 0: nothing is read from the worker's KV tiers


class DecodeCost(msgspec.Struct, frozen=True, gc=False):
    """The cost of the answer on a decode worker."""

    worker: KnownWorker
    total_s: float  # until its end
    slot_s: float  # until a step has room for it
    step_s: float  # of each step with it


class _PathCost(msgspec.Struct, frozen=True, gc=False):
    after_s: float  # from the first token to the last, with the way to the second
    prefill: PrefillCost
    decode: DecodeCost
    transfer_s: float

    @property
    def total_s(self) -> float:
        return self.prefill.total_s + self.after_s


def cheapest_path(
    prefill: Sequence[KnownWorker],
    decode: Sequence[KnownWorker],
    query: PathQuery,
    *,
    left_out: LeftOut = NOBODY,
    decodes_alone: bool = True,
    prefill_decodes: bool = False,
    rotation: int = 0,
) -> Path:
    """The pair of workers, or the worker alone, that is through with the request first; with its estimate.

    Prefill workers that are `left_out` are never taken, decode workers only for want of others, draining ones never.
    Where not `decodes_alone`, a decode worker computes a prompt only where there is no pair; where `prefill_decodes`, a
    prefill worker may write the answer, and does where no decode worker is sound. Of equals, each `rotation` takes
    another. Raises NoPath where nobody is left to write it.
    """
    source = None
    if query.min_pull_tokens is not None:
        source = best_source([*prefill, *decode], query.min_pull_tokens, left_out)
    prefill_costs = [
        prefill_cost(worker, query, source) for worker in able_workers(prefill, query.num_tokens, left_out)
    ]
    if any(one.worker.info.machine for one in prefill_costs):
        prefill_costs = [_with_streams_beside(one, decode) for one in prefill_costs]
    guests = []
    if prefill_decodes:
        guests = [_as_guest(one, decode, query) for one in prefill_costs if _holds_answer(one.worker, query)]
        if guests and not able_workers(decode, query.num_tokens, left_out):
            return _path(_pick_guest(guests, rotation), source)
    decode_costs = [decode_cost(worker, query) for worker in able_to_decode(decode, query.num_tokens, left_out)]
    best = _best_pair(query, prefill_costs, decode_costs, rotation)
    if best is None or decodes_alone:
        alone = [_PathCost(then.total_s, prefill_cost(then.worker, query, source), then, 0.0) for then in decode_costs]
        # A pull may make others nearly as good as those that hold the prompt's beginning.
        quickest = _pick(
            alone,
            lambda one: one.total_s,
            lambda one: (one.decode.worker.requests, -one.decode.worker.cached_tokens),
            rotation,
        )
        if best is None or quickest.total_s < best.total_s:
            best = quickest
    if guests := [one for one in guests if _keeps_promise(one.decode.worker, query)]:
        quickest = _pick_guest(guests, rotation)
        if quickest.total_s < best.total_s:
            best = quickest
    return _path(best, source)


def _pick_guest(guests: Sequence[_PathCost], rotation: int) -> _PathCost:
    return _pick(guests, lambda one: one.total_s, lambda one: (one.decode.worker.requests,), rotation)


def _with_streams_beside(cost: PrefillCost, decode: Sequence[KnownWorker]) -> PrefillCost:
    """Count in what streams on the same CPU or GPU lose while the prompt is computed, as those at a decode worker."""
    beside = _streams_beside(cost.worker, decode)
    return msgspec.structs.replace(cost, total_s=cost.total_s + BESIDE * beside * cost.prefill_s) if beside else cost


def _streams_beside(worker: KnownWorker, decode: Sequence[KnownWorker]) -> float:
    """Return the streams of decode workers that share the worker's CPU or GPU."""
    machine = worker.info.machine
    return sum(one.decoding for one in decode if one.info.machine == machine) if machine else 0.0


def _holds_answer(worker: KnownWorker, query: PathQuery) -> bool:
    """Return True where a worker's cache holds the prompt and the answer, however long it becomes."""
    info = worker.info
    tokens = info.num_blocks * info.layout.groups.tokens_a_block(info.layout.block_size, query.most_tokens)
    return info.max_context >= query.most_tokens and tokens >= query.most_tokens


def _keeps_promise(worker: KnownWorker, query: PathQuery) -> bool:
    """Return False for a prefill worker that is not idle where times between tokens are promised.

    Its streams wait for whole steps of prompts.
    """
    if worker.role == "decode" or query.promise.tpot_s is None:
        return True
    return worker.requests == 0 and worker.prompt_share < MIN_PROMPT_SHARE


def _as_guest(prefill: PrefillCost, decode: Sequence[KnownWorker], query: PathQuery) -> _PathCost:
    """Return the cost of a prefill worker alone, which writes the answer beside prompts that are yet to come.

    Its streams have the time that prompts leave. On a CPU its steps take memory bandwidth and cores from the decode
    workers of the same machine, whose streams wait for them.
    """
    worker, then = prefill.worker, decode_cost(prefill.worker, query)
    left = 1.0 - min(max(worker.prompt_share, MIN_PROMPT_SHARE), MOST_PROMPT_SHARE)
    beside = _streams_beside(worker, decode)
    after_s = then.slot_s + (then.total_s - then.slot_s) * (1.0 + beside) / left
    return _PathCost(after_s, prefill, then, 0.0)


def prefill_cost(worker: KnownWorker, query: PathQuery, source: KnownWorker | None) -> PrefillCost:
    """A prompt's cost on one worker, which can pull what `source` has of it, or read what its own KV tiers have."""
    most = query.num_tokens - 1  # the last token is always computed: the next is drawn from it
    cached_tokens = worker.cached_tokens if worker.cached_tokens < most else most
    queue_s = worker.queue_s(query.promise, query.classes)
    new_tokens = query.num_tokens - cached_tokens
    prefill_s, cost_s = _computing(worker, new_tokens, cached_tokens)
    pull_s = tier_read_s = 0.0
    if source is not None and query.min_pull_tokens is not None:
        offered = source.cached_tokens if source.cached_tokens < most else most
        if offered - cached_tokens >= query.min_pull_tokens and source.kind in worker.takes:
            way_s = HOP_S + (offered - cached_tokens) * worker.token_transfer_s
            rest = query.num_tokens - offered
            rest_s, rest_cost_s = _computing(worker, rest, offered)
            if way_s + rest_cost_s < cost_s:
                pull_s, prefill_s, cost_s, new_tokens = way_s, rest_s, way_s + rest_cost_s, rest
    if worker.tier_tokens > cached_tokens:
        in_tiers = worker.tier_tokens if worker.tier_tokens < most else most
        way_s = worker.tier_read_s + (in_tiers - cached_tokens) * worker.tier_token_s
        rest = query.num_tokens - in_tiers
        rest_s, rest_cost_s = _computing(worker, rest, in_tiers)
        if way_s + rest_cost_s < cost_s:
            pull_s, tier_read_s = 0.0, way_s
            prefill_s, cost_s, new_tokens = rest_s, way_s + rest_cost_s, rest
    return PrefillCost(worker, queue_s + cost_s, queue_s, pull_s, prefill_s, new_tokens, tier_read_s)


def cheapest_prefill(
    prefill: Sequence[KnownWorker], decode: Sequence[KnownWorker], query: PathQuery, *, left_out: LeftOut, rotation: int
) -> Path:
    """Return the path of a prompt that is only scored: the prefill worker that has it done first.

    Without a prefill worker it is the decode worker. Of equals, and of workers that have not reported their costs, it
    is the one with the least work. Raises NoPath.
    """
    able = able_workers(prefill, query.num_tokens, left_out) or able_to_decode(decode, query.num_tokens, left_out)
    choices = [prefill_cost(worker, query, None) for worker in able]
    best = _pick(
        choices,
        lambda one: one.total_s,
        lambda one: (one.worker.queued_tokens(), one.worker.requests, -one.worker.cached_tokens),
        rotation,
    )
    if not best.worker.token_s:
        return Path(None, best.worker.info, is_scoring=True)
    estimate = PathEstimate(best.queue_s, 0.0, best.prefill_s, 0.0, 0.0, 0.0, tier_read_s=best.tier_read_s)
    return Path(None, best.worker.info, estimate=estimate, new_tokens=best.new_tokens, is_scoring=True)


def cheapest_target(workers: Iterable[KnownWorker], query: PathQuery, source: WorkerInfo) -> KnownWorker:
    """Return the worker that goes on quickest with a sequence whose KV comes from `source`.

    Raises NoPath where none has room now. Before workers have reported their costs it is the one with least to do.
    """
    costs = [
        decode_cost(one, query)
        for one in workers
        if one.tier == AVAILABLE
        and one.info.transfer_addresses
        and one.free_tokens > query.num_tokens
        and _holds_answer(one, query)
        and _keeps_promise(one, query)
        and incompatibility(source.layout, one.info.layout) is None
    ]
    costs = [one for one in costs if one.slot_s == 0]
    if not costs:
        raise NoPath("no other worker has room for the stream")
    return min(costs, key=lambda one: (one.total_s, one.worker.requests)).worker


def decode_cost(worker: KnownWorker, query: PathQuery) -> DecodeCost:
    """The answer's cost on one decode worker.

    A slot is there where batch, blocks and promised times between tokens allow; else some request must end first. Of
    R requests one ends every (step x answer / R) seconds.
    """
    step_s = worker.next_step_s + query.num_tokens * worker.context_s
    limit_s = worker.tightest_tpot_s
    if query.promise.tpot_s is not None and query.promise.tpot_s * worker.speedup < limit_s:
        limit_s = query.promise.tpot_s * worker.speedup
    too_many = max(
        worker.requests_over,
        (query.num_tokens - worker.free_tokens) * worker.requests_per_token,
        (step_s - limit_s) * worker.requests_per_s,
    )
    slot_s = 0.0
    if too_many > 0:
        slot_s = min(too_many, worker.requests) * worker.end_s * query.answer_tokens
    return DecodeCost(worker, slot_s + query.answer_tokens * step_s / worker.speedup, slot_s, step_s)


def transfer_s(worker: KnownWorker, query: PathQuery, *, hidden_s: float, last_tokens: float) -> float:
    """Return the seconds left of the KV's transfer to a decode worker when a prefill of `hidden_s` ends.

    The last layer of the last `last_tokens` can't be hidden at all.
    """
    missing = query.num_tokens - worker.cached_tokens
    last_s = min(missing, last_tokens) * worker.layer_transfer_s
    return HOP_S + max(missing * worker.token_transfer_s - hidden_s, last_s)


def _computing(worker: KnownWorker, new_tokens: int, before: int) -> tuple[float, float]:
    """Seconds of a prompt whose beginning is there, and the same with what others wait for it.

    As StepCosts.prefill_s, but for what steps read before their chunks; decode workers' streams share the steps. The
    requests that run there, and the one that is to come next, wait for the prompt's chunks: a second of theirs counts
    as much as one of its own.
    """
    prompt_s = new_tokens * (worker.token_s + worker.pair_s * (before + new_tokens * 0.5))
    prefill_s = math.ceil(new_tokens / worker.chunk_tokens) * worker.step_s + prompt_s
    return prefill_s, prefill_s + worker.stalled * prompt_s


def _best_pair(
    query: PathQuery, prefill_costs: Sequence[PrefillCost], decode_costs: Sequence[DecodeCost], rotation: int
) -> _PathCost | None:
    """A prefill and a decode worker. Decode workers of one kind are weighed together: the same can send to them."""
    best: _PathCost | None = None
    for kind in dict.fromkeys(one.worker.kind for one in decode_costs):
        takers = [one for one in decode_costs if one.worker.kind == kind and one.worker.takes]
        senders = [one for one in prefill_costs if takers and one.worker.kind in takers[0].worker.takes]
        if not senders:
            continue
        first = _pick(senders, lambda one: one.total_s, lambda one: (-one.worker.cached_tokens,), rotation)
        last_tokens = min(first.new_tokens, first.worker.chunk_tokens)
        choices: list[_PathCost] = []
        for then in takers:
            sending_s = transfer_s(then.worker, query, hidden_s=first.prefill_s, last_tokens=last_tokens)
            choices.append(_PathCost(sending_s + then.total_s, first, then, sending_s))
        choice = _pick(
            choices, lambda one: one.after_s, lambda one: (one.decode.worker.requests, one.transfer_s), rotation
        )
        if best is None or choice.total_s < best.total_s:
            best = choice
    return best


def _path(choice: _PathCost, source: KnownWorker | None) -> Path:
    """Return the path of a choice, with its estimate."""
    prefill, decode = choice.prefill, choice.decode
    estimate = PathEstimate(
        queue_s=prefill.queue_s,
        pull_s=prefill.pull_s,
        prefill_s=prefill.prefill_s,
        transfer_s=choice.transfer_s,
        decode_slot_s=decode.slot_s,
        step_s=decode.step_s,
        speedup=decode.worker.speedup,
        tier_read_s=prefill.tier_read_s,
    )
    return Path(
        prefill=None if prefill.worker is decode.worker else prefill.worker.info,
        decode=decode.worker.info,
        source=source.info if source is not None and prefill.pull_s > 0 else None,
        estimate=estimate,
        new_tokens=prefill.new_tokens,
        is_at_prefill=decode.worker.role == "prefill",
    )


# --- by load, or in turn: what the policy is compared with, and until workers have reported their step costs ---


def path_by_load(
    prefill: Sequence[KnownWorker],
    decode: Sequence[KnownWorker],
    num_tokens: int,
    *,
    left_out: LeftOut = NOBODY,
    prefill_decodes: bool = False,
    rotation: int | None = None,
) -> Path:
    """The path for a request whose prompt has `num_tokens` tokens. `left_out` is as `cheapest_path` has it.

    Decode: one whose free blocks hold the prompt before one whose don't, then the fewest requests, then the most free
    blocks. Prefill: the fewest queued tokens among those whose KV the decode worker can take. The worker id breaks
    ties. With a `rotation`, whatever the load: of each role the worker whose turn it is, by worker ids. Where
    `prefill_decodes` and no decode worker is sound, a prefill worker writes the answer. Raises NoPath.
    """
    senders = able_workers(prefill, num_tokens, left_out)
    if prefill_decodes and senders and not able_workers(decode, num_tokens, left_out):
        alone = min(senders, key=lambda one: (one.requests, _name(one)))
        return Path(None, alone.info, is_at_prefill=True)
    able = sorted(able_to_decode(decode, num_tokens, left_out), key=_name)
    if rotation is None:
        taker = min(able, key=lambda one: (one.free_tokens < num_tokens, one.requests, -one.free_tokens))
    else:
        taker = able[rotation % len(able)]
    senders = [one for one in senders if one.kind in taker.takes]
    if not senders:
        return Path(None, taker.info)
    senders.sort(key=_name)
    if rotation is None:
        return Path(min(senders, key=lambda one: (one.queued_tokens(), one.requests)).info, taker.info)
    return Path(senders[rotation % len(senders)].info, taker.info)


def with_source(
    path: Path, workers: Sequence[KnownWorker], num_tokens: int, min_tokens: int, left_out: LeftOut = NOBODY
) -> Path:
    """Return the path with the worker from which the prompt's worker pulls its beginning, if any.

    It must hold `min_tokens` more than the puller, whatever the prompt's last token, which is computed in any case.
    """
    target = next(one for one in workers if one.info.peer == path.prompt_worker.peer)
    source = best_source([one for one in workers if one.kind in target.takes], min_tokens, left_out)
    most = num_tokens - 1
    if source is None or min(source.cached_tokens, most) - min(target.cached_tokens, most) < min_tokens:
        return path
    return msgspec.structs.replace(path, source=source.info)


def _name(worker: KnownWorker) -> str:
    return worker.info.peer.worker_id


# --- workers that may be taken at all ---


def leave_out(failed: Collection[Peer], ejected: Collection[Peer]) -> LeftOut:
    """Return the tiers of workers that have `failed` the request, and of those that fail many."""
    return dict.fromkeys(ejected, EJECTED) | dict.fromkeys(failed, UNWELCOME)


def able_workers(workers: Iterable[KnownWorker], num_tokens: int, left_out: LeftOut) -> list[KnownWorker]:
    """Return the workers that are well, and have room for the prompt."""
    return [one for one in workers if one.info.max_context >= num_tokens and _tier(one, left_out) == AVAILABLE]


def able_to_decode(decode: Iterable[KnownWorker], num_tokens: int, left_out: LeftOut) -> list[KnownWorker]:
    """Return the workers of the best tier. Raises NoPath where none is left."""
    tiers: dict[int, list[KnownWorker]] = {}
    for one in decode:
        if one.info.max_context >= num_tokens:
            tiers.setdefault(_tier(one, left_out), []).append(one)
    least = min(tiers, default=DRAINING)
    if least == DRAINING:
        raise NoPath("no decode worker is available; try again shortly")
    return tiers[least]


def best_source(workers: Iterable[KnownWorker], min_tokens: int, left_out: LeftOut) -> KnownWorker | None:
    """Return the worker of either role with most of the prompt, and of those the one with the fewest requests."""
    able = [one for one in workers if one.cached_tokens >= min_tokens and _tier(one, left_out) == AVAILABLE]
    return max(able, key=lambda one: (one.cached_tokens, -one.requests), default=None)


def _tier(worker: KnownWorker, left_out: LeftOut) -> int:
    return max(worker.tier, left_out.get(worker.info.peer, AVAILABLE)) if left_out else worker.tier


def _pick(some: Sequence[T], cost_s: Callable[[T], float], work: Callable[[T], tuple[float, ...]], rotation: int) -> T:
    """Return the cheapest; of those about as good the ones with the least work; of those each in turn."""
    most_s = min(map(cost_s, some)) * (1 + _EQUAL)
    near = [one for one in some if cost_s(one) <= most_s]
    if len(near) > 1:
        least = min(map(work, near))
        near = [one for one in near if work(one) == least]
    return near[rotation % len(near)]


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
_MIN_S = 1e-3
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
        slower = _first_token_s(path.estimate) / max(_first_token_s(best.estimate), _MIN_S)
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
