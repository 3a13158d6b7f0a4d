"""Whose turn it is: the order of those who wait for a step, the same on both kinds of worker. Pure.

Higher priorities go first. Within one, requests that have tokens already, resumed or preempted ones, go before those
that have none: somebody reads along. Then the policy decides:

    edf    by the deadline of the first token: least time left first; without a promise, as if it were a minute
    sjf    by the tokens to be computed, fewest first. Whoever waits grows smaller with time, so long ones come, too
    fcfs   by arrival

A turn doesn't change while a request waits. So nobody overtakes one whose turn has come but by coming before it in this
order, and each policy lets only so much come before it; across priorities it is ClassShares that sees to that.
"""

import heapq
from collections.abc import Iterator, Sequence
from typing import Literal, Protocol, TypeVar

from twostroke.model.class_shares import ClassShares
from twostroke.protocol.requests import GenerateRequest

QueuePolicy = Literal["edf", "sjf", "fcfs"]
Turn = tuple[float, ...]
"""The smallest goes first."""

UNPROMISED_S = 60.0  # the deadline of requests that were promised none: after all others, and yet not never
AGEING_TOKENS_PER_S = 512.0  # so many tokens fewer count after each second of waiting
LEAST_AHEAD = 64  # tokens: chunks that a class gets before higher ones are no smaller, unless they end a prompt
NO_LIMIT = 1 << 62  # tokens


class Queued(Protocol):
    """What the order sees of a job of either kind of worker."""

    arrival: int  # 0, 1, 2, ...: the order in which requests came
    arrived_at: float  # in seconds of the worker's clock
    num_uncached: int  # tokens that were not in the prefix cache when it came
    turn: Turn

    @property
    def request(self) -> GenerateRequest:
        """What was asked for."""

    @property
    def has_begun(self) -> bool:
        """Whether it has output tokens already."""

    @property
    def num_indivisible(self) -> int:
        """Tokens that it must be given at once, or 0 where chunks will do."""

    @property
    def num_to_compute(self) -> int:
        """Tokens whose KV is still missing."""


Job = TypeVar("Job", bound=Queued)


def turn_of(job: Queued, policy: QueuePolicy) -> Turn:
    """The job's turn under a policy."""
    promise = job.request.promise
    urgency = 0.0
    match policy:
        case "edf":
            urgency = job.arrived_at + (UNPROMISED_S if promise.ttft_left_s is None else promise.ttft_left_s)
        case "sjf":
            urgency = job.num_uncached + job.arrived_at * AGEING_TOKENS_PER_S
        case "fcfs":
            pass  # the arrival alone
    return (-promise.priority, not job.has_begun, urgency, job.arrival)


def turns(ready: Sequence[Sequence[Job]], shares: ClassShares) -> Iterator[tuple[Job, int]]:
    """Everybody in order, each with the tokens that it may be given in this turn; `ready` are lists in that order.

    First come those whose class has saved enough, each with what is saved: a job may come twice.
    """
    if shares:
        firsts: dict[str, Job] = {}
        for jobs in ready:
            for name, job in {job.request.promise.class_name: job for job in reversed(jobs)}.items():
                firsts[name] = min(firsts.get(name, job), job, key=_turn)
        for job in sorted(firsts.values(), key=_turn):
            saved = shares.saved(job.request.promise.class_name)
            if saved >= (job.num_indivisible or min(LEAST_AHEAD, job.num_to_compute)):
                yield job, saved
    for job in heapq.merge(*ready, key=_turn):
        yield job, NO_LIMIT


def _turn(job: Queued) -> Turn:
    return job.turn
