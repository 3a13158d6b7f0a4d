"""Whose turn it is, and who gives way: the order of requests, the same in both roles. Pure.

Higher priorities go first. Within one, requests that have tokens already, resumed or preempted ones, go before those
that have none: somebody reads along. Then the policy decides:

    edf    by the deadline of the first token: least time left first; without a promise, as if it were a minute
    sjf    by the tokens to be computed, fewest first: those of the prompt, and on a decode worker those of the answer,
           as many as answers of its kind have had (worker/answer_lengths.py). They count as a later arrival, by
           MOST_OVERTAKING_S at most: nobody goes before one who came so much earlier
    fcfs   by arrival

A turn doesn't change while a request waits. So nobody overtakes one whose turn has come but by coming before it in this
order, and each policy lets only so much come before it; across priorities it is ClassShares that sees to that.

Classes of a lower priority get their share while higher ones keep a worker busy, so that none starves. A class that
waits saves up its share of the tokens that go to higher classes. What it has saved it may spend before them; what it is
given anyhow is paid from that, too. Where nobody of the class waits, nothing is kept: it has missed nothing.

Where blocks are short, one of a higher class gets those of lower ones: the youngest of the lowest class gives way
first. So the oldest of the highest always gets on, and everyone in turn. Whoever was admitted by its class's share
while higher ones waited is spared: it would else be thrown out as often as it is let in.
"""

import heapq
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from twostroke.protocol.requests import Promise
from twostroke.worker.scheduling.job import Turn, WorkerJob

LEAST_SHARE = 0.02  # of a class that has been promised less: it must get on, too
MOST_SHARE = 0.9


class ClassShares:
    """Tokens saved by each class. They may stand for anything that is scheduled and counted: tokens, rows of steps."""

    def __init__(self) -> None:
        self._saved: dict[str, float] = {}

    def __bool__(self) -> bool:
        """Whether any class has something saved."""
        return bool(self._saved)

    def saved(self, class_name: str) -> int:
        """Whole tokens that the class may have before any higher class."""
        return int(self._saved.get(class_name, 0.0))

    def settle(self, given: Mapping[Promise, int], waiting: Iterable[Promise]) -> None:
        """A step gives so many tokens to requests with these promises, and leaves these classes waiting for more."""
        highest = max((promise.priority for promise in given), default=None)
        if highest is None and not self._saved:
            return
        saved: dict[str, float] = {}
        for name, promise in {promise.class_name: promise for promise in waiting}.items():
            to_higher = sum(tokens for other, tokens in given.items() if other.priority > promise.priority)
            to_it = sum(tokens for other, tokens in given.items() if other.class_name == name)
            share = min(max(promise.share, LEAST_SHARE), MOST_SHARE)
            # x of T tokens are its share of all once x / (T - x) of what others get are saved.
            left = self._saved.get(name, 0.0) + to_higher * share / (1 - share) - to_it
            if left > 0:
                saved[name] = left
        self._saved = saved


QueuePolicy = Literal["edf", "sjf", "fcfs"]
UNPROMISED_S = 60.0  # the deadline of requests that were promised none: after all others, and yet not never
PROMPT_TOKENS_PER_S = 512.0  # of a prompt, so many tokens count as a second of later arrival
ANSWER_TOKENS_PER_S = 16.0  # of an answer, each of whose tokens takes a step
MOST_OVERTAKING_S = 60.0  # nobody is overtaken by one who came so much later, however short
LEAST_AHEAD = 64  # tokens: chunks that a class gets before higher ones are no smaller, unless they end a prompt
NO_LIMIT = 1 << 62  # tokens


def turn_of(job: WorkerJob, policy: QueuePolicy, answer_tokens: float = 0.0) -> Turn:
    """The job's turn under a policy; so many tokens of its answer are expected to be computed here."""
    promise = job.request.promise
    urgency = 0.0
    match policy:
        case "edf":
            urgency = job.arrived_at + (UNPROMISED_S if promise.ttft_left_s is None else promise.ttft_left_s)
        case "sjf":
            urgency = shortest_first(job.arrived_at, job.num_uncached, answer_tokens)
        case "fcfs":
            pass  # the arrival alone
    return (-promise.priority, not job.has_begun, urgency, job.arrival)


def shortest_first(arrived_at: float, prompt_tokens: int, answer_tokens: float) -> float:
    """Return when a request with so many tokens has its turn: the longer it is, the later it counts as arrived."""
    later_s = prompt_tokens / PROMPT_TOKENS_PER_S + answer_tokens / ANSWER_TOKENS_PER_S
    return arrived_at + min(later_s, MOST_OVERTAKING_S)


def turns(ready: Sequence[Sequence[WorkerJob]], shares: ClassShares) -> Iterator[tuple[WorkerJob, int]]:
    """Everybody in order, each with the tokens that it may be given in this turn; `ready` are lists in that order.

    First come those whose class has saved enough, each with what is saved: a job may come twice.
    """
    if shares:
        firsts: dict[str, WorkerJob] = {}
        for jobs in ready:
            for name, job in {job.request.promise.class_name: job for job in reversed(jobs)}.items():
                firsts[name] = min(firsts.get(name, job), job, key=_turn)
        for job in sorted(firsts.values(), key=_turn):
            saved = shares.saved(job.request.promise.class_name)
            if saved >= (job.num_indivisible or min(LEAST_AHEAD, job.num_to_compute)):
                yield job, saved
    for job in heapq.merge(*ready, key=_turn):
        yield job, NO_LIMIT


def _turn(job: WorkerJob) -> Turn:
    return job.turn


# --- predicted lengths of answers, for sjf ---

FIRST_GUESS = 100.0  # tokens, before any answer has ended
WEIGHT = 0.05  # of an answer that has ended, in a mean of many

Group = tuple[str | int, ...]


@dataclass(slots=True)
class _Mean:
    """A mean in which the last answers count more than those long ago."""

    tokens: float = 0.0
    num_answers: int = 0

    def add(self, tokens: int) -> None:
        self.num_answers += 1
        self.tokens += max(WEIGHT, 1 / self.num_answers) * (tokens - self.tokens)


@dataclass(slots=True)
class AnswerLengths:
    """Predicts the lengths of answers, and learns from each one that ends."""

    _means: dict[Group, _Mean] = field(default_factory=dict)

    def expected(self, class_name: str, num_prompt_tokens: int) -> float:
        """Tokens of the answer to such a prompt."""
        return next(
            (self._means[group].tokens for group in _groups(class_name, num_prompt_tokens) if group in self._means),
            FIRST_GUESS,
        )

    def ended(self, class_name: str, num_prompt_tokens: int, num_tokens: int) -> None:
        """An answer has ended after so many tokens."""
        for group in _groups(class_name, num_prompt_tokens):
            self._means.setdefault(group, _Mean()).add(num_tokens)


def _groups(class_name: str, num_prompt_tokens: int) -> Iterator[Group]:
    """The groups that a request belongs to, the narrowest first."""
    yield (class_name, num_prompt_tokens.bit_length())
    yield (class_name,)
    yield ()
