"""What a decode worker's step may take: who may decode together, and how much of prompts is computed beside them. Pure.

Both follow from the worker's own step costs. While these are not known, nobody is kept waiting, and chunks of prompts
beside decodes are small.

Whether a step may be decided while another is under way, and what it goes on from. Pure.

What a decode worker can never serve, whatever else it has to do. Pure.
"""

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from twostroke.decode_worker.jobs import DecodeJob, DecodeStep
from twostroke.model.step import is_penalised
from twostroke.protocol.errors import RequestError
from twostroke.protocol.requests import GenerateRequest
from twostroke.protocol.stats import LEAST_STRETCH, StepCosts

CAUTIOUS_CHUNK = 64  # prompt tokens beside decodes while costs are not known
CHUNK_MULTIPLE = 16  # kernels compute so many rows together


class Places:
    """Who has a place in the batch so far, and whether one more still leaves everybody the promised time per token."""

    def __init__(self, costs: StepCosts | None, safety: float):
        self._costs = costs
        self._safety = safety
        self._num_rows = 0
        self._num_context_tokens = 0
        self._tightest_s = math.inf

    def allow(self, job: DecodeJob) -> bool:
        """Whether the step would be short enough with the job in it; one alone is always allowed."""
        tightest_s = min(self._tightest_s, _tpot_s(job))
        if self._costs is None or self._num_rows == 0 or tightest_s == math.inf:
            return True
        num_rows = self._num_rows + 1
        num_context_tokens = self._num_context_tokens + len(job.sequence.token_ids)
        step_s = self._costs.base_s + self._costs.decode_s(num_rows, num_context_tokens)
        lone_s = self._costs.base_s + self._costs.decode_s(1, num_context_tokens // num_rows)
        return step_s <= max(tightest_s * self._safety, LEAST_STRETCH * lone_s)

    def take(self, job: DecodeJob) -> None:
        """The job has a place."""
        self._num_rows += 1
        self._num_context_tokens += len(job.sequence.token_ids)
        self._tightest_s = min(self._tightest_s, _tpot_s(job))


class PromptBudget:
    """What is left of one step for chunks of prompts: tokens, and time where decodes would wait for it."""

    def __init__(self, tokens: int, *, least: int = 0, seconds: float | None = None, costs: StepCosts | None = None):
        """`least` tokens are given whatever time they take, so that prompts always get on."""
        self._tokens = tokens
        self._least = min(least, tokens)
        self._seconds = seconds
        self._costs = costs

    @property
    def is_spent(self) -> bool:
        """Whether not even a small chunk with nothing before it is left."""
        return self._most(CHUNK_MULTIPLE, 0) == 0

    def take(self, wanted: int, num_before: int) -> int:
        """A chunk of at most `wanted` tokens after `num_before` others; 0 where nothing is left."""
        num_tokens = self._most(wanted, num_before)
        self._tokens -= num_tokens
        self._least = max(0, self._least - num_tokens)
        if num_tokens and self._seconds is not None and self._costs is not None:
            self._seconds -= self._costs.context_s * num_before + self._costs.prompt_s(num_tokens, num_before)
        return num_tokens

    def _most(self, wanted: int, num_before: int) -> int:
        most = min(wanted, self._tokens)
        if self._seconds is None or self._costs is None:
            return most
        in_time = tokens_in(self._costs, self._seconds - self._costs.context_s * num_before, num_before)
        if in_time >= most:
            return most
        return min(most, max(in_time - in_time % CHUNK_MULTIPLE, self._least))


@dataclass(frozen=True, slots=True)
class StepBudget:
    """One worker's bounds of steps, in the terms of DecodeConfig."""

    max_step_tokens: int
    costs: Callable[[], StepCosts | None]
    tpot_safety: float
    stall_factor: float
    min_chunk_tokens: int

    def places(self) -> Places:
        """An empty batch."""
        return Places(self.costs(), self.tpot_safety)

    def for_prompts(self, decodes: Iterable[DecodeJob]) -> PromptBudget:
        """For a step in which these requests decode."""
        contexts, tightest_s = [], math.inf
        for job in decodes:
            contexts.append(len(job.sequence.token_ids))
            tightest_s = min(tightest_s, _tpot_s(job))
        tokens = self.max_step_tokens - len(contexts)
        if not contexts:
            return PromptBudget(tokens)
        costs = self.costs()
        if costs is None:
            return PromptBudget(min(tokens, CAUTIOUS_CHUNK))
        decode_s = costs.base_s + costs.decode_s(len(contexts), sum(contexts))
        step_s = self.stall_factor * decode_s if tightest_s == math.inf else tightest_s * self.tpot_safety
        return PromptBudget(tokens, least=self.min_chunk_tokens, seconds=step_s - decode_s, costs=costs)


def tokens_in(costs: StepCosts, seconds: float, num_before: int) -> int:
    """How many prompt tokens after `num_before` others are computed in so much time: prompt_s the other way round."""
    if seconds <= 0:
        return 0
    token_s = costs.token_s + costs.pair_s * num_before  # of the first; each one after it also sees those before it
    # n * (token_s + pair_s / 2 * n) = seconds, in the form that loses nothing where pair_s is small, or 0
    divisor = token_s + math.sqrt(token_s * token_s + 2 * costs.pair_s * seconds)
    return int(min(2 * seconds / divisor, 1e9)) if divisor > 0 else int(1e9)


def _tpot_s(job: DecodeJob) -> float:
    promised_s = job.request.promise.tpot_s
    return math.inf if promised_s is None else promised_s


def must_be_awaited(in_flight: DecodeStep) -> bool:
    """Whether the next step can't be decided before the end of this one, however many blocks are free."""
    if any(len(entry.step.token_ids) > 1 for entry in in_flight.entries):
        return True  # prompts take long: the little that running ahead gains isn't worth a newcomer's wait
    if in_flight.swaps:
        return True  # nobody knows yet which blocks that frees
    # All wait for a draw that needs to know the tokens before it: were it left out, it would get every other step only.
    return any(
        one.step.draw is not None
        and is_penalised(one.step.draw.sampling)
        and not (one.job.has_ended or one.job.is_drawing_its_last)
        for one in in_flight.entries
    )


def drawn_for(step: DecodeStep | None) -> dict[DecodeJob, int]:
    """The jobs that a step draws a token for, with the entry that does."""
    return {} if step is None else {one.job: i for i, one in enumerate(step.entries) if one.step.draw is not None}


def check_fits(request: GenerateRequest, *, max_context: int, capacity: int) -> None:
    """Raises RequestError for a request that could never run to its end. All in tokens; `capacity` is the cache's."""
    if not request.token_ids:
        raise RequestError("the prompt is empty", param="prompt")
    longest = request.num_prompt_tokens + request.max_tokens
    asked = f"{request.num_prompt_tokens} prompt tokens and max_tokens {request.max_tokens} exceed"
    if longest > max_context:
        raise _too_long(f"{asked} the model's context of {max_context}")
    if longest - 1 > capacity:  # the last token's KV is never needed
        raise _too_long(f"{asked} this worker's whole KV cache, which holds {capacity}")


def _too_long(message: str) -> RequestError:
    return RequestError(message, param="max_tokens", code="context_length_exceeded")
