"""The demand on the whole server, as one router sees it, for the autoscaler.

Counts what *arrives*, also what is turned away: what was served tells of the workers that there are, not of those that
there should be. All numbers are flat, since that is how they travel; several routers' counters add up, and what each
tells of the workers is of the same workers (`cluster/autoscaling/samples.py` puts them together).
"""

import statistics
from collections.abc import Iterable, Sequence

import msgspec

from twostroke.protocol.clock import Clock
from twostroke.protocol.requests import GenerateRequest
from twostroke.protocol.stats import ROLES, WorkerInfo, WorkerStats, role_of, typical
from twostroke.router.slo.classes import SLOClass

ASKED_S = 600.0
"""Seconds after its last request for which a class's promises count."""


class Demand:
    """Counters of one router since its start."""

    def __init__(self, classes: Sequence[SLOClass], clock: Clock):
        self._classes = classes
        self._clock = clock
        self._asked_at: dict[str, float] = {}
        counted = ("requests", "prompt_tokens", "prompt_pairs", "cached_tokens", "output_tokens", "ended")
        self._counts = dict.fromkeys(counted, 0.0)
        self._spared_pairs = 0.0  # of prompts found in a cache, not taken off yet

    def arrived(self, request: GenerateRequest) -> None:
        """A sequence is asked for, whatever becomes of it."""
        self._counts["requests"] += 1
        self._counts["prompt_tokens"] += request.num_prompt_tokens
        self._count_pairs(request.num_prompt_tokens**2 / 2)
        self._asked_at[request.promise.class_name] = self._clock()

    def turned_away(self, num_choices: int) -> None:
        """Count choices that are refused before their prompts are known: they are taken to be like the others."""
        counts = self._counts
        if counts["requests"]:
            self._count_pairs(num_choices * counts["prompt_pairs"] / counts["requests"])
            counts["prompt_tokens"] += num_choices * counts["prompt_tokens"] / counts["requests"]
        counts["requests"] += num_choices

    def ended(self, num_cached_tokens: int, num_output_tokens: int) -> None:
        """The answer to a sequence is over: by itself, or because the client left."""
        self._counts["ended"] += 1
        self._counts["cached_tokens"] += num_cached_tokens
        self._counts["output_tokens"] += num_output_tokens
        self._spared_pairs += num_cached_tokens**2 / 2

    def numbers(self) -> dict[str, float]:
        """The counters, and the tightest promises among the classes that are asked for; 0 where nothing is promised."""
        now = self._clock()
        asked = [one for one in self._classes if now - self._asked_at.get(one.name, now - 2 * ASKED_S) < ASKED_S]
        return self._counts | {
            "ttft_s": min((one.ttft_s for one in asked if one.ttft_s is not None), default=0.0),
            "tpot_s": min((one.tpot_s for one in asked if one.tpot_s is not None), default=0.0),
        }

    def _count_pairs(self, num_pairs: float) -> None:
        """Pairs of a token and one that it attends to; those that a cache has spared are taken off later prompts'.

        A prompt of L tokens has L^2 / 2, of which the first p have p^2 / 2. What is cached is known when all is over,
        and a counter can't go back.
        """
        spared = min(self._spared_pairs, num_pairs)
        self._spared_pairs -= spared
        self._counts["prompt_pairs"] += num_pairs - spared


def fleet_numbers(workers: Iterable[tuple[WorkerInfo, WorkerStats]]) -> dict[str, float]:
    """Return the numbers of the workers that can take requests, summed up by role; names begin with the role and a dot.

    `base_s` and the other costs are those of the worker in the middle; they are absent while no worker knows its own.
    """
    serving = [(info, stats) for info, stats in workers if not stats.is_draining]
    numbers: dict[str, float] = {}
    for role in ROLES:
        of_role = [(info, stats) for info, stats in serving if role_of(info, stats) == role]
        numbers |= {f"{role}.{name}": value for name, value in _role_numbers(of_role).items()}
    return numbers


def _tokens(blocks: Iterable[tuple[int, WorkerInfo]]) -> float:
    """Return the tokens of typical requests that so many blocks hold."""
    return float(sum(count * info.layout.groups.tokens_a_block(info.layout.block_size) for count, info in blocks))


def _role_numbers(workers: Sequence[tuple[WorkerInfo, WorkerStats]]) -> dict[str, float]:
    queued = sum(one.requests for _, stats in workers for one in stats.queued)
    present = sum(stats.num_waiting + stats.num_running for _, stats in workers)
    numbers = {
        "running": float(len(workers)),
        "queued_requests": float(queued),
        "queued_tokens": float(sum(stats.num_waiting_tokens for _, stats in workers)),
        "num_decoding": float(max(0, present - queued)),
        "context_tokens": float(sum(stats.context_tokens for _, stats in workers)),
        "owned_tokens": _tokens((stats.owned_blocks, info) for info, stats in workers),
        "total_tokens": _tokens((stats.total_blocks, info) for info, stats in workers),
    }
    if workers:
        numbers["max_batch"] = float(statistics.median_low(info.max_batch for info, _ in workers))
        numbers["step_tokens"] = float(statistics.median_low(info.max_step_tokens for info, _ in workers))
    costs = typical(stats.costs for _, stats in workers)
    if costs is not None:
        numbers |= {name: float(value) for name, value in msgspec.structs.asdict(costs).items()}
    return numbers
