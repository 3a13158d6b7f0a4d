"""The order of requests in a worker's queue, the same in both roles. Pure.

Higher priorities go first. Within one priority, requests that have tokens already (resumed or preempted ones) go before
those that have none: their clients are reading. Then the policy decides:

    edf    by the deadline of the first token: least time left first; without a promise, UNPROMISED_S are assumed
    sjf    by the tokens to be computed, fewest first: those of the prompt, and on a decode worker those predicted for
           the answer (`AnswerLengths`). They count as a later arrival, by MOST_OVERTAKING_S at most: no request
           overtakes one that arrived that much earlier
    fcfs   by arrival

A turn doesn't change while a request waits. So a request is overtaken only by those that come before it in this order,
and each policy bounds how many can. Across priorities, ClassShares bounds it.

Classes of a lower priority get their share while higher ones keep a worker busy, so that none starves. A class that
waits saves up its share of the tokens that go to higher classes, and may spend these savings before them. Tokens that
it gets in its own turn are paid from the savings too. A class without waiting requests loses its savings.
"""

import heapq
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from twostroke.protocol.requests import Promise
from twostroke.worker.constants import (
    ANSWER_MEAN_WEIGHT,
    ANSWER_TOKENS_PER_S,
    FIRST_ANSWER_TOKENS,
    LEAST_CLASS_CHUNK,
    LEAST_SHARE,
    MOST_OVERTAKING_S,
    MOST_SHARE,
    PROMPT_TOKENS_PER_S,
    UNPROMISED_S,
)
from twostroke.worker.scheduling.job import Turn, WorkerJob


class ClassShares:
    """The savings of each class, in tokens, or in rows of steps where those are scheduled."""

    def __init__(self) -> None:
        self._saved: dict[str, float] = {}

    def __bool__(self) -> bool:
        """Return True where any class has savings."""
        return bool(self._saved)

    def saved(self, class_name: str) -> int:
        """Return the whole tokens that the class may have before any higher class."""
        return int(self._saved.get(class_name, 0.0))

    def settle(self, given: Mapping[Promise, int], waiting: Iterable[Promise]) -> None:
        """Account for a step: the tokens given by promise, and the classes that it leaves waiting for more."""
        highest = max((promise.priority for promise in given), default=None)
        if highest is None and not self._saved:
            return
        saved: dict[str, float] = {}
        for name, promise in {promise.class_name: promise for promise in waiting}.items():
            to_higher = sum(tokens for other, tokens in given.items() if other.priority > promise.priority)
            to_it = sum(tokens for other, tokens in given.items() if other.class_name == name)
            share = min(max(promise.share, LEAST_SHARE), MOST_SHARE)
            # x of T tokens are its share once it saves x / (T - x) of the tokens that others get.
            left = self._saved.get(name, 0.0) + to_higher * share / (1 - share) - to_it
            if left > 0:
                saved[name] = left
        self._saved = saved


QueuePolicy = Literal["edf", "sjf", "fcfs"]
NO_LIMIT = 1 << 62
"""Tokens of a turn without a limit."""


def turn_of(job: WorkerJob, policy: QueuePolicy, answer_tokens: float = 0.0) -> Turn:
    """Return the job's turn under a policy; `answer_tokens` are expected to be computed here."""
    promise = job.request.promise
    urgency = 0.0
    match policy:
        case "edf":
            urgency = job.arrived_at + (UNPROMISED_S if promise.ttft_left_s is None else promise.ttft_left_s)
        case "sjf":
            urgency = shortest_first(job.arrived_at, job.num_uncached, answer_tokens)
        case "fcfs":
            pass  # the arrival alone
    return (-promise.priority, not job.has_output, urgency, job.arrival)


def shortest_first(arrived_at: float, prompt_tokens: int, answer_tokens: float) -> float:
    """Return the time at which a request counts as arrived: the more tokens it has, the later."""
    later_s = prompt_tokens / PROMPT_TOKENS_PER_S + answer_tokens / ANSWER_TOKENS_PER_S
    return arrived_at + min(later_s, MOST_OVERTAKING_S)


def turns(ready: Sequence[Sequence[WorkerJob]], shares: ClassShares) -> Iterator[tuple[WorkerJob, int]]:
    """Yield all jobs in order, each with the tokens that it may get in this turn; `ready` are lists in that order.

    Jobs whose class has saved enough come first, with the savings as their limit; these jobs come twice.
    """
    if shares:
        firsts: dict[str, WorkerJob] = {}
        for jobs in ready:
            for name, job in {job.request.promise.class_name: job for job in reversed(jobs)}.items():
                firsts[name] = min(firsts.get(name, job), job, key=_turn)
        for job in sorted(firsts.values(), key=_turn):
            saved = shares.saved(job.request.promise.class_name)
            if saved >= (job.num_indivisible or min(LEAST_CLASS_CHUNK, job.num_to_compute)):
                yield job, saved
    for job in heapq.merge(*ready, key=_turn):
        yield job, NO_LIMIT


def _turn(job: WorkerJob) -> Turn:
    return job.turn


# --- predicted lengths of answers, for sjf ---


Group = tuple[str | int, ...]


@dataclass(slots=True)
class _Mean:
    """A mean in which recent answers count more than old ones."""

    tokens: float = 0.0
    num_answers: int = 0

    def add(self, tokens: int) -> None:
        self.num_answers += 1
        self.tokens += max(ANSWER_MEAN_WEIGHT, 1 / self.num_answers) * (tokens - self.tokens)


@dataclass(slots=True)
class AnswerLengths:
    """Predicts the lengths of answers, and learns from each one that ends.

    A request's answer is expected to be as long as the mean of its SLO class and of prompts about as long as its own
    (within a factor of two). Before one of these has ended, the mean of its class counts, then that of all answers.
    """

    _means: dict[Group, _Mean] = field(default_factory=dict)

    def expected(self, class_name: str, num_prompt_tokens: int) -> float:
        """Return the expected tokens of an answer."""
        return next(
            (self._means[group].tokens for group in _groups(class_name, num_prompt_tokens) if group in self._means),
            FIRST_ANSWER_TOKENS,
        )

    def ended(self, class_name: str, num_prompt_tokens: int, num_tokens: int) -> None:
        """Learn from an answer that has ended."""
        for group in _groups(class_name, num_prompt_tokens):
            self._means.setdefault(group, _Mean()).add(num_tokens)


def _groups(class_name: str, num_prompt_tokens: int) -> Iterator[Group]:
    """Yield the groups that a request belongs to, the narrowest first."""
    yield (class_name, num_prompt_tokens.bit_length())
    yield (class_name,)
    yield ()
