"""Admission: a request that would break its own promise, or those of others, is refused at once (429).

Pure: an estimate of the path's times goes in, a decision comes out; the clock is injected. `Pipeline` asks once for
each choice, when its path is held and nothing has been sent yet. Six heuristics decide, each with its test in
tests/router/slo/test_admission.py:

1. Correction (`classes.py`): predictions are multiplied by how wrong earlier ones were.
2. Higher classes first (`_prompt_s`): a worker of whose time higher classes want the part rho has 1 - rho left for a
   prompt, but never less for a class than its share; other routers' prompts of the last moment are added.
3. Steps for higher classes (`_slow_steps`): steps never become slower than classes of a higher priority, which may come
   at any time, need them.
4. Reserve (`_kept_free`): a part of every limit is kept for higher classes and for classes below their share.
5. Hysteresis (`_kept_free`): a class that was refused gets in again only some way below its limit.
6. Trials (`_is_trial`): after a while without an admission one request is let in against all predictions.

`Gate` bounds the choices that one router has under way, whatever they were promised.
"""

import asyncio
import math
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal

from twostroke.protocol.clock import Clock
from twostroke.protocol.errors import RequestError
from twostroke.protocol.requests import GenerateRequest, Peer, Promise
from twostroke.protocol.stats import WorkerStats
from twostroke.router.fleet import NoPath
from twostroke.router.request_state import Path, PathEstimate
from twostroke.router.slo.classes import ClassHistory, Correction, DecayingSum, SLOConfig

RESERVE = 0.15
"""Part of every limit that is kept for higher classes and for classes below their share."""
HIGHER_FOR_FULL_RESERVE = 1 / 3
"""Part of the offered requests that are of higher classes from which on the whole reserve is kept."""
HYSTERESIS = 0.1
"""Part of every limit below which a refused class gets in again, so that it does not flap."""
PROBE_S = 2.0
"""Time without any admission after which one is let in: predictions may be wrong, or a share was not given."""
PRESSED_S = 2.0
"""Seconds after its last refusal for which a class counts as waiting for its share."""
MIN_AVAILABLE = 0.05
"""Least part of a worker that is taken to be left for a class, whatever higher classes want."""
MAX_RETRY_AFTER_S = 60
WANTED_S = 4.0
"""Seconds for which a wanted prompt counts. With more, idle workers refuse lower classes for long after an overload."""
BLIND_S = 0.5
"""Time between two reports of a worker's numbers, in which they don't count what was sent."""
_OFFERED_LATELY = 0.5
"""Requests, fading, from which on a class counts as in use."""
_MIN_WORK_S = 1e-6
"""Work below which a worker's load is forgotten."""

Stats = Callable[[Peer], WorkerStats | None]


Limit = Literal["ttft", "tpot", "queue"]
"""The limit that a request would break: promised time to first token, promised time per token, or the longest queue."""


class Overloaded(RequestError):
    """The request would be late, or would make others late (429)."""

    def __init__(self, message: str, *, limit: Limit, retry_after_s: int):
        super().__init__(message, code="overloaded", status=429, retry_after_s=retry_after_s)
        self.limit: Limit = limit


@dataclass(frozen=True, slots=True)
class _Fault:
    """The reason of a refusal, and the time that the path needs to take the request if no other comes."""

    limit: Limit
    reason: str
    clears_in_s: float  # infinite: it takes too long even alone


class PromptLoad:
    """One router's demand on one worker that computes prompts, by class, in seconds of prompts."""

    def __init__(self) -> None:
        self._wanted: dict[int, DecayingSum] = defaultdict(lambda: DecayingSum(WANTED_S))  # by priority
        self._unseen: dict[str, DecayingSum] = defaultdict(lambda: DecayingSum(BLIND_S))  # by class
        self.sent_at = -math.inf

    def want(self, priority: int, prompt_s: float, now: float) -> None:
        """A prompt would like to be computed there, whether it is let in or not."""
        self._wanted[priority].add(prompt_s, now)

    def send(self, class_name: str, prompt_s: float, now: float) -> None:
        """A prompt is let in."""
        self._unseen[class_name].add(prompt_s, now)
        self.sent_at = now

    def wanted_above(self, priority: int, now: float) -> float:
        """The part of the worker's time that classes of a higher priority want; above 1 where they want too much."""
        return sum(one.rate(now) for other, one in self._wanted.items() if other > priority)

    def unseen_s(self, now: float, class_name: str | None = None) -> float:
        """Work that the worker's stats don't tell of yet: of one class, or of all."""
        if class_name is not None:
            return self._unseen[class_name].value(now) if class_name in self._unseen else 0.0
        return sum(one.value(now) for one in self._unseen.values())

    def is_forgotten(self, now: float) -> bool:
        """Return whether nothing has been wanted of it for long."""
        return all(one.value(now) < _MIN_WORK_S for one in self._wanted.values())


class Admission:
    """The decisions of one router of `num_routers`. `stats` gives a worker's newest numbers."""

    def __init__(self, *, config: SLOConfig, stats: Stats, clock: Clock, num_routers: int = 1):
        self._config = config
        self._stats = stats
        self._clock = clock
        self._num_routers = num_routers
        self._classes = {one.name: ClassHistory(one.priority, one.share) for one in config.classes}
        self._loads: dict[Peer, PromptLoad] = {}  # of workers that compute prompts
        self._admitted_at = -math.inf

    def admit(self, request: GenerateRequest, path: Path, waited_s: float, follows: bool) -> None:
        """Count the request as admitted, `waited_s` after it arrived. Raises Overloaded.

        One that `follows` is another choice of a response that was let in.
        """
        now = self._clock()
        history = self._history(request.promise)
        if path.estimate is not None and self._config.admission and not follows:
            history.offered.add(1.0, now)
            self._load(path, now).want(request.promise.priority, path.estimate.prefill_s, now)
            fault = self._fault(request, path, path.estimate, history, waited_s)
            if fault is not None and not self._is_trial(fault, path, path.estimate, history, now):
                history.is_refusing = True
                history.refused_at = now
                retry_after_s = self._retry_after_s(fault, path, path.estimate, history, now)
                message = f"{fault.reason}; try again in {retry_after_s} s"
                raise Overloaded(message, limit=fault.limit, retry_after_s=retry_after_s)
            history.is_refusing = False
            history.admitted.add(1.0, now)
        self._count(request, path, history, now)

    def ended(
        self,
        request: GenerateRequest,
        num_output_tokens: int,
        predicted: tuple[PathEstimate, float] | None,
        tpot_s: float | None,
    ) -> None:
        """Learn from a request that is over. `predicted`: what was expected of it, and its time to first token then."""
        history = self._history(request.promise)
        if num_output_tokens:
            history.has_put_out(num_output_tokens)
        if predicted is None:
            return
        now, promise = self._clock(), request.promise
        expected, ttft_s = predicted
        if promise.ttft_left_s is not None:
            history.ttft.learn(expected.ttft_s, ttft_s, promise.ttft_left_s, now)
        if promise.tpot_s is not None and tpot_s is not None:
            history.tpot.learn(_tpot_s(expected, num_output_tokens), tpot_s, promise.tpot_s, now)

    def ttft_correction(self, class_name: str) -> float:
        """The factor by which the class's predicted times to first token are multiplied now."""
        history = self._classes.get(class_name)
        return 1.0 if history is None else history.ttft.factor(self._clock())

    def _fault(
        self, request: GenerateRequest, path: Path, estimate: PathEstimate, history: ClassHistory, waited_s: float
    ) -> _Fault | None:
        promise = request.promise
        now = self._clock()
        if promise.ttft_left_s is None and promise.tpot_s is None:
            # Nothing can be late; but who would wait so long has left by then.
            too_long_s = estimate.queue_s - self._config.max_queue_s
            return _Fault("queue", "the queue is too long", too_long_s) if too_long_s > 0 else None
        part = 1.0 - self._kept_free(promise, history, now)
        is_idle = self._is_idle(path, estimate)
        if promise.ttft_left_s is not None:
            predicted_s = estimate.pull_s + estimate.tier_read_s + self._prompt_s(request, path, estimate, now)
            if not is_idle:
                predicted_s = history.ttft.corrected(predicted_s, promise.ttft_left_s, now)
            limit_s = part * promise.ttft_left_s - waited_s
            if predicted_s > limit_s:
                if estimate.tier_read_s + estimate.prefill_s > promise.ttft_left_s:
                    return _Fault("ttft", _hopeless(estimate, promise.ttft_left_s), math.inf)
                reason = f"the first token would come after {predicted_s:.2g} s, beyond what its class promises"
                return _Fault("ttft", reason, predicted_s - limit_s)
        return None if is_idle else self._slow_steps(request, path, estimate, history, part)

    def _is_idle(self, path: Path, estimate: PathEstimate) -> bool:
        """Return whether the request would have the path to itself: no better time will come for it."""
        stats = self._stats(path.decode.peer)
        return estimate.queue_s == 0 and stats is not None and stats.num_running + stats.num_waiting == 0

    def _slow_steps(
        self, request: GenerateRequest, path: Path, estimate: PathEstimate, history: ClassHistory, part: float
    ) -> _Fault | None:
        """Return a fault where tokens would come too slowly: this request's, or those of requests that run already."""
        stats = self._stats(path.decode.peer)
        limits: list[tuple[float, float]] = []  # predicted, allowed
        num_outputs = history.expected_output(request.max_tokens)
        own_s = request.promise.tpot_s
        if own_s is not None and request.max_tokens > 1:
            predicted_s = history.tpot.corrected(_tpot_s(estimate, num_outputs), own_s, self._clock())
            limits.append((predicted_s, part * own_s))
        if stats is not None and stats.tightest_tpot_s is not None:
            limits.append((estimate.step_s, stats.tightest_tpot_s))
        for higher_s, correction in self._tpots_of_higher(request.promise):
            limits.append((correction.corrected(estimate.token_s, higher_s, self._clock()), part * higher_s))
        for predicted_s, limit_s in limits:
            if predicted_s > limit_s:
                # Of so many requests that run, each ends within its output's steps: the time until enough have.
                running = max(1, stats.num_running) if stats is not None else 1
                too_many = max(1.0, running * (1 - limit_s / predicted_s))
                clears_in_s = too_many * num_outputs * estimate.token_s / running
                return _Fault("tpot", "tokens would come more slowly than is promised to requests", clears_in_s)
        return None

    def _kept_free(self, promise: Promise, history: ClassHistory, now: float) -> float:
        """The part of its limits that a request can't use."""
        if self._is_below_share(history, now):
            return 0.0
        offered = sum(one.offered.value(now) for one in self._classes.values())
        higher = sum(one.offered.value(now) for one in self._classes.values() if one.priority > promise.priority)
        reserve = RESERVE * min(1.0, higher / offered / HIGHER_FOR_FULL_RESERVE) if offered > 0 else 0.0
        for other in self._classes.values():
            if other is not history and self._is_below_share(other, now) and now - other.refused_at < PRESSED_S:
                reserve = RESERVE
        return reserve + (HYSTERESIS if history.is_refusing else 0.0)

    def _is_below_share(self, history: ClassHistory, now: float) -> bool:
        tokens = sum(one.tokens.value(now) for one in self._classes.values())
        return history.tokens.value(now) < history.share * tokens

    def _is_trial(self, fault: _Fault, path: Path, estimate: PathEstimate, history: ClassHistory, now: float) -> bool:
        """Return whether it is let in despite all predictions: wrong ones, or higher classes, could shut it out.

        A worker that is thought too slow even for a prompt alone is tried though others let in what they can: with
        nothing to do it would never learn better.
        """
        if path.is_cost_probe and fault.limit == "ttft":
            return True
        if fault.clears_in_s == math.inf and self._untried_s(path, estimate, now) <= 0:
            return True
        since = history.admitted_at if self._is_below_share(history, now) else self._admitted_at
        return now - since > max(PROBE_S, 2 * estimate.ttft_s)

    def _untried_s(self, path: Path, estimate: PathEstimate, now: float) -> float:
        """Return the seconds until the path is tried with a prompt that is thought to take too long even alone."""
        tried_s = now - self._load(path, now).sent_at
        alone_s = estimate.tier_read_s + estimate.prefill_s
        return max(estimate.queue_s, max(PROBE_S, 2 * alone_s) - tried_s)

    def _prompt_s(self, request: GenerateRequest, path: Path, estimate: PathEstimate, now: float) -> float:
        """Return the seconds until the prompt is computed, with all that will come before it."""
        promise, load = request.promise, self._load(path, now)
        # Each of the other routers has probably sent as much as this one has, and the worker's stats don't tell of it.
        unseen_s = (self._num_routers - 1) * load.unseen_s(now)
        left = max(1.0 - load.wanted_above(promise.priority, now), MIN_AVAILABLE)
        predicted_s = (estimate.queue_s + unseen_s + estimate.prefill_s) / left
        stats = self._stats(path.prompt_worker.peer)
        if promise.share == 0 or stats is None:
            return predicted_s
        # Whatever higher classes want, prompts of its own class go on at their share of the worker.
        token_s = estimate.prefill_s / max(1, path.new_tokens or request.num_prompt_tokens)
        own_s = sum(one.tokens for one in stats.queued if one.class_name == promise.class_name) * token_s
        own_s += self._num_routers * load.unseen_s(now, promise.class_name)
        return min(predicted_s, (own_s + estimate.prefill_s) / promise.share)

    def _tpots_of_higher(self, promise: Promise) -> list[tuple[float, Correction]]:
        """The times between tokens that classes of a higher priority need, of those that asked for something lately."""
        now = self._clock()
        return [
            (one.tpot_s, self._classes[one.name].tpot)
            for one in self._config.classes
            if one.priority > promise.priority
            and one.tpot_s is not None
            and self._classes[one.name].offered.value(now) > _OFFERED_LATELY
        ]

    def _load(self, path: Path, now: float) -> PromptLoad:
        worker = path.prompt_worker.peer
        if worker not in self._loads:
            for other, load in list(self._loads.items()):  # workers come and go: none stays behind
                if load.is_forgotten(now):
                    del self._loads[other]
            self._loads[worker] = PromptLoad()
        return self._loads[worker]

    def _count(self, request: GenerateRequest, path: Path, history: ClassHistory, now: float) -> None:
        history.admitted_at = self._admitted_at = now
        history.tokens.add(request.num_prompt_tokens + history.expected_output(request.max_tokens), now)
        if path.estimate is not None:
            self._load(path, now).send(request.promise.class_name, path.estimate.prefill_s, now)

    def _history(self, promise: Promise) -> ClassHistory:
        return self._classes.setdefault(promise.class_name, ClassHistory(promise.priority, promise.share))

    def _retry_after_s(
        self, fault: _Fault, path: Path, estimate: PathEstimate, history: ClassHistory, now: float
    ) -> int:
        """When the path can take it, after those who were refused lately and will come back, too.

        Where it never can, when it is next tried all the same.
        """
        if fault.clears_in_s == math.inf:
            expected_s = self._untried_s(path, estimate, now)
        else:
            expected_s = fault.clears_in_s + history.backlog_s(now)
        return math.ceil(min(max(expected_s, 1.0), float(MAX_RETRY_AFTER_S)))


def _tpot_s(estimate: PathEstimate, num_outputs: float) -> float:
    """The mean time between tokens: of steps, and the way to the second token, which the first doesn't wait for."""
    return estimate.token_s + (estimate.transfer_s + estimate.decode_slot_s) / max(1.0, num_outputs - 1)


def _hopeless(estimate: PathEstimate, ttft_s: float) -> str:
    alone_s = estimate.tier_read_s + estimate.prefill_s
    return (
        f"computing the prompt takes {alone_s:.2g} s even alone, and its class promises the first token "
        f"within {ttft_s:.2g} s: choose another class, or loosen the promise (x-slo-ttft-ms)"
    )


class Gate:
    """Lets `most` choices in at once. `turned_away` is called with the choices of each refused request."""

    def __init__(self, most: int, turned_away: Callable[[int], None], clock: Clock):
        self._most = most
        self._turned_away = turned_away
        self._clock = clock
        self._num_choices = 0
        self._cuts: set[asyncio.Future[None]] = set()  # of the responses under way
        self._takes_until: float | None = None  # None: for as long as it lives

    @contextmanager
    def room(self, num_choices: int) -> Iterator[None]:
        """Places for so many choices, from before they are tokenised to the end of the response.

        Raises RequestError (429) where the router has as much under way as it takes, NoPath where it is about to end.
        """
        if self._takes_until is not None and self._clock() >= self._takes_until:
            raise NoPath("the server is about to end")
        if self._num_choices + num_choices > self._most:
            self._turned_away(num_choices)
            raise RequestError(
                "the server has as many requests as it can take; try again shortly",
                code="overloaded",
                status=429,
                retry_after_s=1,
            )
        self._num_choices += num_choices
        try:
            yield
        finally:
            self._num_choices -= num_choices

    @contextmanager
    def cuttable(self) -> Iterator["asyncio.Future[None]"]:
        """Yield a future for a response, done when the server ends and the response has to end at once."""
        cut: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._cuts.add(cut)
        try:
            yield cut
        finally:
            self._cuts.discard(cut)

    @property
    def num_choices(self) -> int:
        """Choices under way."""
        return self._num_choices

    @property
    def is_draining(self) -> bool:
        """Return whether the server is about to end, though it may still take requests."""
        return self._takes_until is not None

    def drain(self, notice_s: float) -> None:
        """Be not ready from now on, and take new requests for `notice_s` more: load balancers notice meanwhile."""
        self._takes_until = self._clock() + notice_s

    def cut(self) -> int:
        """Take nothing new, and end every response under way with an error; returns how many choices those have."""
        self.drain(notice_s=0.0)
        for cut in self._cuts:
            if not cut.done():
                cut.set_result(None)
        return self._num_choices
