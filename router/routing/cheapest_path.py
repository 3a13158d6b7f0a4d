"""The path with the least predicted time, by what every worker has cached and has to do: read `cheapest_path`. Pure.

docs/routing.md has the formulas. The costs of whoever reads the prompt and of the decode worker add up, so the best of
each is looked for, never the best of all pairs. What couples the two, that prefill hides the transfer, is settled with
the chosen prefill worker's time.
"""

import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypeVar

import msgspec

from twostroke.protocol.requests import Peer, Promise
from twostroke.router.fleet import Estimate, NoPath, Path
from twostroke.router.routing.workers import AVAILABLE, DRAINING, EJECTED, UNWELCOME, Classes, KnownWorker

HOP_S = 0.002
"""Of any transfer, however short: offer, grant, commit and its answer."""

_EQUAL = 0.05
"""Costs within this part of the least count as equal, and load decides: fitted costs are no better than that."""


Held = tuple[KnownWorker, int]
"""A worker, and how many tokens of the prompt's beginning it has."""

LeftOut = Mapping[Peer, int]
"""Workers that are not to be taken for a request, or only for want of others: the tiers that they fall to."""

NOBODY: LeftOut = {}

T = TypeVar("T")


class Need(NamedTuple):
    """What a request asks of its workers."""

    num_tokens: int  # of the prompt, and of what was sent of the answer
    answer_tokens: float  # that are still to come, about
    promise: Promise
    min_pull_tokens: int | None  # what a pull must spare; None: nothing is pulled


class Reading(msgspec.Struct, frozen=True, gc=False):
    """What the prompt would cost on a worker of either role, in the cheaper way, with or without a pull."""

    worker: KnownWorker
    total_s: float  # until the first token, and what others wait for it, added up
    queue_s: float
    pull_s: float  # 0: nothing is pulled
    prefill_s: float
    new_tokens: int  # to be computed
    missing_tokens: int  # that are not cached there: what would be computed without a pull


class Answering(msgspec.Struct, frozen=True, gc=False):
    """What the answer would cost on a decode worker."""

    worker: KnownWorker
    total_s: float  # until its end
    slot_s: float  # until a step has room for it
    step_s: float  # of each step with it


class _Choice(msgspec.Struct, frozen=True, gc=False):
    after_s: float  # from the first token to the last, with the way to the second
    reading: Reading
    answering: Answering
    transfer_s: float

    @property
    def total_s(self) -> float:
        return self.reading.total_s + self.after_s


@dataclass(frozen=True, slots=True)
class Source:
    """Whoever a prompt's beginning can be pulled from."""

    worker: KnownWorker
    tokens: int  # that it holds


def cheapest_path(
    prefill: Sequence[Held],
    decode: Sequence[Held],
    need: Need,
    classes: Classes,
    *,
    left_out: LeftOut = NOBODY,
    decodes_alone: bool = True,
    turn: int = 0,
) -> Path:
    """The pair of workers, or the decode worker alone, that is through with the request first; with its estimate.

    Prefill workers that are `left_out` are never taken, decode workers only for want of others, draining ones never.
    Where not `decodes_alone`, a decode worker computes a prompt only where there is no pair. Of equals, each `turn`
    takes another. Raises NoPath where no decode worker is left.
    """
    source = None
    if need.min_pull_tokens is not None:
        source = best_source([*prefill, *decode], need.min_pull_tokens, left_out)
    able = able_to_prefill(prefill, need.num_tokens, left_out)
    reading = [read(worker, need, held, source, classes) for worker, held in able]
    able = able_to_decode(decode, need.num_tokens, left_out)
    answering = [(answer(worker, need), held) for worker, held in able]
    best = _best_pair(need, reading, answering, turn)
    if best is None or decodes_alone:
        alone = _best_alone(need, answering, source, classes, turn)
        if best is None or alone.total_s < best.total_s:
            best = alone
    return _path(best, need, source)


def read(worker: KnownWorker, need: Need, held: int, source: Source | None, classes: Classes) -> Reading:
    """A prompt's cost on one worker that holds the first `held` tokens of it, and can pull those of `source`."""
    most = need.num_tokens - 1  # the last token is always computed: the next is drawn from it
    if held > most:
        held = most
    queue_s = worker.queue_s(need.promise, classes)
    missing = new_tokens = need.num_tokens - held
    prefill_s, cost_s = _computing(worker, new_tokens, held)
    pull_s = 0.0
    if source is not None and need.min_pull_tokens is not None:
        offered = source.tokens if source.tokens < most else most
        if offered - held >= need.min_pull_tokens and source.worker.kind in worker.takes:
            way_s = HOP_S + (offered - held) * worker.token_transfer_s
            rest = need.num_tokens - offered
            rest_s, rest_cost_s = _computing(worker, rest, offered)
            if way_s + rest_cost_s < cost_s:
                pull_s, prefill_s, cost_s, new_tokens = way_s, rest_s, way_s + rest_cost_s, rest
    return Reading(worker, queue_s + cost_s, queue_s, pull_s, prefill_s, new_tokens, missing)


def answer(worker: KnownWorker, need: Need) -> Answering:
    """The answer's cost on one decode worker.

    A slot is there where batch, blocks and everybody's time between tokens allow; else some request must end first. Of
    R requests one ends every (step x answer / R) seconds.
    """
    step_s = worker.next_step_s + need.num_tokens * worker.context_s
    limit_s = worker.tightest_tpot_s
    if need.promise.tpot_s is not None and need.promise.tpot_s < limit_s:
        limit_s = need.promise.tpot_s
    too_many = max(
        worker.requests_over,
        (need.num_tokens - worker.free_tokens) * worker.requests_per_token,
        (step_s - limit_s) * worker.requests_per_s,
    )
    slot_s = 0.0
    if too_many > 0:
        slot_s = min(too_many, worker.requests) * worker.end_s * need.answer_tokens
    return Answering(worker, slot_s + need.answer_tokens * step_s, slot_s, step_s)


def transfer_s(worker: KnownWorker, need: Need, held: int, *, hidden_s: float, last_tokens: float) -> float:
    """What is left of the KV's transfer to a decode worker when a prefill of `hidden_s` ends.

    `held` is what it has already. The last layer of the last `last_tokens` can't be hidden at all.
    """
    missing = need.num_tokens - held
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
    need: Need, reading: Sequence[Reading], answering: Sequence[tuple[Answering, int]], turn: int
) -> _Choice | None:
    """A prefill and a decode worker. Decode workers of one kind are weighed together: the same can send to them."""
    best: _Choice | None = None
    for kind in dict.fromkeys(one.worker.kind for one, _ in answering):
        takers = [(one, held) for one, held in answering if one.worker.kind == kind and one.worker.takes]
        senders = [one for one in reading if takers and one.worker.kind in takers[0][0].worker.takes]
        if not senders:
            continue
        first = _pick(senders, lambda one: one.total_s, lambda one: (one.missing_tokens,), turn)
        choices: list[_Choice] = []
        for then, held in takers:
            last_tokens = min(first.new_tokens, first.worker.chunk_tokens)
            sending_s = transfer_s(then.worker, need, held, hidden_s=first.prefill_s, last_tokens=last_tokens)
            choices.append(_Choice(sending_s + then.total_s, first, then, sending_s))
        choice = _pick(
            choices, lambda one: one.after_s, lambda one: (one.answering.worker.requests, one.transfer_s), turn
        )
        if best is None or choice.total_s < best.total_s:
            best = choice
    return best


def _best_alone(
    need: Need,
    answering: Sequence[tuple[Answering, int]],
    source: Source | None,
    classes: Classes,
    turn: int,
) -> _Choice:
    """A decode worker that computes the prompt itself."""
    choices = [
        _Choice(then.total_s, read(then.worker, need, held, source, classes), then, 0.0) for then, held in answering
    ]
    # A pull may make others nearly as good as those that hold the prompt's beginning.
    return _pick(
        choices,
        lambda one: one.total_s,
        lambda one: (one.answering.worker.requests, one.reading.missing_tokens),
        turn,
    )


def _path(choice: _Choice, need: Need, source: Source | None) -> Path:
    """With what is expected of it."""
    reading, answering = choice.reading, choice.answering
    estimate = Estimate(
        queue_s=reading.queue_s,
        pull_s=reading.pull_s,
        prefill_s=reading.prefill_s,
        transfer_s=choice.transfer_s,
        decode_slot_s=answering.slot_s,
        step_s=answering.step_s,
    )
    return Path(
        prefill=None if reading.worker is answering.worker else reading.worker.info,
        decode=answering.worker.info,
        source=source.worker.info if source is not None and reading.pull_s > 0 else None,
        estimate=estimate,
        new_tokens=reading.new_tokens,
        cached_tokens=need.num_tokens - reading.missing_tokens,
    )


def leave_out(failed: Collection[Peer], ejected: Collection[Peer]) -> LeftOut:
    """Those that have `failed` the request, and those that fail many."""
    return dict.fromkeys(ejected, EJECTED) | dict.fromkeys(failed, UNWELCOME)


def able_to_prefill(prefill: Iterable[Held], num_tokens: int, left_out: LeftOut) -> list[Held]:
    """Those that are well, and have room for the prompt."""
    return [one for one in prefill if one[0].info.max_context >= num_tokens and _tier(one[0], left_out) == AVAILABLE]


def able_to_decode(decode: Iterable[Held], num_tokens: int, left_out: LeftOut) -> list[Held]:
    """The least objectionable. Raises NoPath where none is left."""
    tiers: dict[int, list[Held]] = {}
    for one in decode:
        if one[0].info.max_context >= num_tokens:
            tiers.setdefault(_tier(one[0], left_out), []).append(one)
    least = min(tiers, default=DRAINING)
    if least == DRAINING:
        raise NoPath("no decode worker is available; try again shortly")
    return tiers[least]


def best_source(workers: Iterable[Held], min_tokens: int, left_out: LeftOut) -> Source | None:
    """Whoever has most of the prompt, of either role, and of those the one with the fewest requests."""
    best: Source | None = None
    for worker, held in workers:
        if held < min_tokens or (best is not None and held < best.tokens):
            continue
        if _tier(worker, left_out) != AVAILABLE:
            continue
        if best is None or held > best.tokens or worker.requests < best.worker.requests:
            best = Source(worker, held)
    return best


def _tier(worker: KnownWorker, left_out: LeftOut) -> int:
    return max(worker.tier, left_out.get(worker.info.peer, AVAILABLE)) if left_out else worker.tier


def _pick(some: Sequence[T], cost_s: Callable[[T], float], work: Callable[[T], tuple[float, ...]], turn: int) -> T:
    """Whichever costs least; of those about as good the ones with the least work; of those each in turn."""
    most_s = min(map(cost_s, some)) * (1 + _EQUAL)
    near = [one for one in some if cost_s(one) <= most_s]
    if len(near) > 1:
        least = min(map(work, near))
        near = [one for one in near if work(one) == least]
    return near[turn % len(near)]
