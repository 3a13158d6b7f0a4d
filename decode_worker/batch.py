"""Who has a place in the batch. Pure.

Whoever has one keeps it, so that streams flow; newcomers wait until there is room, in the order of their arrival. Only
for one of a higher class do others stop, the youngest of the lowest class first: their KV stays where it is, and they
go on when there is room again. A class that stands still gets its share of the tokens all the same.
"""

from collections import Counter
from collections.abc import Iterable, Sequence

from twostroke.decode_worker.jobs import DecodeJob
from twostroke.decode_worker.step_budget import StepBudget
from twostroke.model.class_shares import ClassShares
from twostroke.protocol.requests import Promise


class Batch:
    """At most `max_batch` requests, and no more than leave each of them the time per token that it was promised."""

    def __init__(self, max_batch: int, budget: StepBudget):
        self._max_batch = max_batch
        self._budget = budget
        self._shares = ClassShares()

    def choose(self, jobs: Sequence[DecodeJob]) -> list[DecodeJob]:
        """Those of `jobs` that are in the next step, in the order in which they are given."""
        if len(jobs) <= self._max_batch and not _is_promised(jobs):
            return list(jobs)
        places = self._budget.places()
        chosen: set[DecodeJob] = set()
        has_newcomers = False
        is_open = True  # to newcomers: none overtakes one for whom there is no room, though its own promise be looser
        for job in self._ranked(jobs):
            if len(chosen) == self._max_batch:
                break
            # Costs may have changed, or contexts grown: that stops nobody. A newcomer of a higher class does.
            if (job.has_place and not has_newcomers) or ((job.has_place or is_open) and places.allow(job)):
                has_newcomers = has_newcomers or not job.has_place
                chosen.add(job)
                places.take(job)
            elif not job.has_place:
                is_open = False
        return [job for job in jobs if job in chosen]

    def has_room(self, newcomer: DecodeJob, jobs: Iterable[DecodeJob]) -> bool:
        """Whether a newcomer would have a place beside those of `jobs` that are not of a lower class."""
        priority = newcomer.request.promise.priority
        not_lower = [job for job in jobs if job.request.promise.priority >= priority]
        if len(not_lower) >= self._max_batch:
            return False
        places = self._budget.places()
        for job in not_lower:
            places.take(job)
        return places.allow(newcomer)

    def settle(self, jobs: Sequence[DecodeJob], chosen: Sequence[DecodeJob]) -> None:
        """A step with the `chosen` of `jobs` begins."""
        given: Counter[Promise] = Counter()
        waiting: list[Promise] = []
        if len(chosen) < len(jobs):
            having = set(chosen)
            for job in jobs:
                job.has_place = job in having
                if job.has_place:
                    given[job.request.promise] += 1
                else:
                    waiting.append(job.request.promise)
        else:
            for job in jobs:
                job.has_place = True
        self._shares.settle(given, waiting)

    def _ranked(self, jobs: Sequence[DecodeJob]) -> list[DecodeJob]:
        ranked = sorted(jobs, key=_rank)
        if not self._shares:
            return ranked
        taken: Counter[str] = Counter()
        ahead: list[DecodeJob] = []
        behind: list[DecodeJob] = []
        for job in ranked:
            name = job.request.promise.class_name
            if taken[name] < self._shares.saved(name):
                taken[name] += 1
                ahead.append(job)
            else:
                behind.append(job)
        return ahead + behind


def _rank(job: DecodeJob) -> tuple[int, bool, int]:
    return (-job.request.promise.priority, not job.has_place, job.arrival)


def _is_promised(jobs: Iterable[DecodeJob]) -> bool:
    return any(job.request.promise.tpot_s is not None for job in jobs)
