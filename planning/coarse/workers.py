"""Workers of either role whose time goes by in closed form: nothing happens between two changes.

Both write answers in the same way; a role is how it computes prompts beside them. A decode worker's steps keep their
pace, and prompts get what is left of it. A prefill worker's steps are prompts', one by one, and answers ride along.

Simpler than the real ones in three ways, on the slow side or small: a worker reserves a request's whole answer in its
KV cache at once, so that nothing is preempted and nothing moves for want of blocks; KV of prompts that are computed
takes no room on prefill workers; and without moves a draining worker ends what it has begun however long that takes.
"""

import heapq
import math
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

from twostroke.decode_worker.config import DecodeConfig
from twostroke.planning.costs.drafted_steps import DecodeStep, drafted_step
from twostroke.prefill_worker.config import PrefillConfig
from twostroke.prefill_worker.policy import PrefillPolicy
from twostroke.protocol.stats import Role
from twostroke.worker.profile import WorkerProfile
from twostroke.worker.scheduling.step_policy import PromptBudget, StepBudget


@dataclass(slots=True)
class CoarseRequest:
    """One, and what became of it."""

    at_s: float
    prompt_tokens: int
    output_tokens: int
    first_s: float = math.inf  # when its first token was there
    last_s: float = math.inf
    target: "CoarseWorker | None" = None  # that is to write the answer, once a router has said so
    is_refused: bool = False
    came_s: float = math.inf  # when its stream came to the worker that writes it
    num_moves: int = 0
    ended_at: Role = "decode"  # role of the worker that wrote the last token

    @property
    def ttft_s(self) -> float:
        """Time to first token from arrival, in seconds."""
        return self.first_s - self.at_s

    @property
    def tpot_s(self) -> float:
        """Mean, from the first token on; 0 for an answer of one."""
        return (self.last_s - self.first_s) / (self.output_tokens - 1) if self.output_tokens > 1 else 0.0


SETTINGS = DecodeConfig()
"""The share of a promised time a token, and the smallest chunk of a prompt, that the live scheduler plans with."""


@dataclass(slots=True)
class DecodingRow:
    """A request that decodes, or waits to."""

    request: CoarseRequest
    written: int = 1  # tokens of its answer, when it came
    end_step: float = 0.0


class CoarseWorker:
    """Continuous batching: t = base + B row + K context a step, K growing by B each; steps are real numbers here.

    Where drafts are accepted, a step is a step's part for one token of each request: all have the batch's mean.

    `read` takes requests whose prompts are to be computed here, `join` those whose KV is here.
    """

    role: ClassVar[Role]

    def __init__(self, profile: WorkerProfile, ordered_s: float, ready_s: float, tpot_s: float = math.inf) -> None:
        self.profile = profile
        self.ordered_s = ordered_s
        self.ready_s = ready_s
        self.gone_s: float | None = None
        self.event = 0  # the number of the last change: what was expected before it is void
        self.coming = 0  # requests that a router has promised it, their KV not here yet
        self.coming_tokens = 0
        self.step = 0.0
        self.now_s = ready_s
        self.context = 0.0
        self.held_tokens = 0  # reserved in the KV cache
        self.rows: list[tuple[float, int, DecodingRow]] = []  # heap, by the step at which they end
        self.waiting: deque[DecodingRow] = deque()
        self.waiting_tokens = 0  # of their prompts and of what was written
        self.pace_s = tpot_s * SETTINGS.tpot_safety
        self._number = 0

    @property
    def step_s(self) -> float:
        """Time of the running step without prompts, in seconds."""
        costs = self.profile.costs
        rows = len(self.rows)
        return costs.reading_s(rows) + rows * costs.row_s + self.context * costs.context_s

    def drafted(self, *, has_prompts: bool = False) -> DecodeStep:
        """Return a step of the running requests with drafts, perhaps beside prompts, whose time is not in it."""
        rows = len(self.rows)
        context = self.context / rows if rows else 0.0
        return drafted_step(self.profile, rows, context, self.pace_s, has_prompts=has_prompts)

    @property
    def num_requests(self) -> int:
        """All that are here, or on their way."""
        return len(self.rows) + len(self.waiting) + self.coming + self.num_prompts

    @property
    def num_prompts(self) -> int:
        """Return how many prompts wait here, or are computed."""
        raise NotImplementedError

    def read(self, request: CoarseRequest, now_s: float) -> None:
        """A request that has come, and whose prompt is computed here."""
        raise NotImplementedError

    def next_end_s(self) -> float:
        """When the next row or prompt ends; infinity without any."""
        raise NotImplementedError

    def end_some(self, now_s: float) -> list[CoarseRequest]:
        """The requests whose prompt, or whose answer, has ended; `last_s` tells which."""
        raise NotImplementedError

    def join(self, request: CoarseRequest, now_s: float, written: int = 1) -> None:
        """A request whose KV has come, with so many tokens of its answer."""
        self.advance(now_s)
        request.came_s = now_s
        self.waiting.append(DecodingRow(request, written))
        self.waiting_tokens += request.prompt_tokens + written
        self._admit()

    def written(self, row: DecodingRow) -> int:
        """Return how many tokens of its answer a running row has now."""
        left = row.end_step - self.step
        return max(row.written, min(row.request.output_tokens - 1, math.floor(row.request.output_tokens - left)))

    def leave(self, row: DecodingRow) -> None:
        """Let a running row go on elsewhere. Call `advance` before it."""
        request, written = row.request, self.written(row)
        self.rows = [one for one in self.rows if one[2] is not row]
        heapq.heapify(self.rows)
        self._forget(request, request.prompt_tokens + written)
        self._admit()

    def _end_row(self, now_s: float) -> CoarseRequest:
        end_step, _, row = heapq.heappop(self.rows)
        if self.step > end_step and self.profile.repeated:  # its last step drew more tokens than it wanted
            self.context -= self.step - end_step
        else:
            self.step = end_step
        request = row.request
        self._forget(request, request.prompt_tokens + request.output_tokens)
        request.last_s = now_s
        self._admit()
        return request

    def _forget(self, request: CoarseRequest, context: float) -> None:
        self.context -= context
        self.held_tokens -= request.prompt_tokens + request.output_tokens
        if not self.rows:
            self.context = 0.0

    def advance(self, now_s: float) -> None:
        """Steps go on until `now_s`."""
        seconds = now_s - self.now_s
        if seconds > 0:
            self._advance_steps(self._steps(seconds) if self.rows else 0.0, now_s)

    def _advance_steps(self, steps: float, now_s: float) -> None:
        self.step += steps
        self.context += steps * len(self.rows)
        self.now_s = now_s

    def _admit(self) -> None:
        while self.waiting and len(self.rows) < self.profile.max_batch:
            row = self.waiting[0]
            request = row.request
            tokens = request.prompt_tokens + request.output_tokens
            if self.rows and self.held_tokens + tokens > self.profile.kv_tokens:
                return
            self.waiting.popleft()
            self.waiting_tokens -= request.prompt_tokens + row.written
            row.end_step = self.step + request.output_tokens - row.written
            self._number += 1
            heapq.heappush(self.rows, (row.end_step, self._number, row))
            self.held_tokens += tokens
            self.context += request.prompt_tokens + row.written

    def _next_row_s(self) -> float:
        """When the next row ends, if nothing but rows is in the steps until then."""
        return self.now_s + self._seconds(max(0.0, self.rows[0][0] - self.step)) if self.rows else math.inf

    def _first_s(self) -> tuple[float, float]:
        """Return the seconds of the next token of each row, and by how much each further one takes longer."""
        growth_s = self.profile.costs.context_s * len(self.rows)
        if not self.profile.repeated:
            return self.step_s, growth_s
        step = self.drafted()
        return step.token_s, growth_s * (1 + step.drafted / len(self.rows)) / step.tokens

    def _seconds(self, steps: float) -> float:
        first_s, growth_s = self._first_s()
        return steps * (first_s + growth_s * steps / 2)

    def _steps(self, seconds: float) -> float:
        first_s, growth_s = self._first_s()
        return 2 * seconds / (first_s + math.sqrt(first_s * first_s + 2 * growth_s * seconds))


_PREFILL_SETTINGS = PrefillConfig()


class CoarsePrefillWorker(CoarseWorker):
    """Prompts share steps, first come first served, as in the live scheduler; each waits for its last one's end.

    While there are prompts, each row gets a token a step.
    """

    role = "prefill"

    def __init__(self, profile: WorkerProfile, ordered_s: float, ready_s: float, tpot_s: float = math.inf) -> None:
        super().__init__(profile, ordered_s, ready_s, tpot_s)
        self.free_s = 0.0
        self.ends_s = math.inf  # of the step that runs, if it has prompts
        self.computed_tokens = 0
        self._queue: deque[tuple[CoarseRequest, int]] = deque()  # and how much of it is computed
        self._step: list[tuple[CoarseRequest, int]] = []  # and how much of it will be
        self._stall = StepBudget(
            _PREFILL_SETTINGS, lambda: profile.costs, PrefillPolicy.longest_chunk, PrefillPolicy.most_stall_s
        )

    @property
    def num_prompts(self) -> int:
        return len(self._queue) + len(self._step)

    def end_of(self, tokens: int, now_s: float) -> float:
        """When a prompt that comes now would be done, about."""
        begin_s = max(now_s, self.free_s)
        costs, step_tokens = self.profile.costs, self.profile.step_tokens
        alone_s = costs.prefill_s(tokens, 0, step_tokens)
        if begin_s == now_s:
            return begin_s + alone_s
        return begin_s + alone_s - costs.base_s * (-(-tokens // step_tokens) - tokens / step_tokens)  # in shared steps

    def read(self, request: CoarseRequest, now_s: float) -> None:
        """A prompt comes; where none is computed, a step begins with it."""
        self.advance(now_s)
        self.free_s = self.end_of(request.prompt_tokens, now_s)
        self._queue.append((request, 0))
        if self.ends_s == math.inf:
            self._begin(now_s)

    def next_end_s(self) -> float:
        return self.ends_s if self.ends_s < math.inf else self._next_row_s()

    def end_some(self, now_s: float) -> list[CoarseRequest]:
        if self.ends_s == math.inf:
            self.advance(now_s)
            return [self._end_row(now_s)]
        self._advance_steps(self.drafted(has_prompts=True).tokens if self.rows else 0.0, now_s)
        ended = []
        while self.rows and self.rows[0][0] - self.step < 1e-6:
            ended.append(self._end_row(now_s))
        ended += self._end_prompts(now_s)
        self._begin(now_s)
        if self.ends_s == math.inf:
            self.free_s = now_s
        return ended

    def _end_prompts(self, now_s: float) -> Iterator[CoarseRequest]:
        step, self._step = self._step, []
        self._queue.extendleft((request, done) for request, done in step if done < request.prompt_tokens)
        for request in [request for request, done in step if done == request.prompt_tokens]:
            request.first_s = now_s
            if request.target is self:
                self.coming -= 1
                self.coming_tokens -= request.prompt_tokens
                if request.output_tokens <= 1:
                    request.last_s = now_s
                else:
                    self.join(request, now_s)
            yield request

    def advance(self, now_s: float) -> None:
        """Steps go on until `now_s`; a step with prompts counts when it ends."""
        if self.ends_s == math.inf:
            super().advance(now_s)

    def _begin(self, now_s: float) -> None:
        costs = self.profile.costs
        rows_s = self.step_s - costs.reading_s(len(self.rows))
        budget = self._budget(costs.weights_s + rows_s)
        seconds, tokens = costs.weights_s + rows_s, 0
        while self._queue and len(self._step) + len(self.rows) < self.profile.max_batch:
            request, done = self._queue[0]
            taken = budget.take(request.prompt_tokens - done, done)
            if not taken:
                break
            self._queue.popleft()
            seconds += costs.prompt_s(taken, done) + costs.context_s * done
            tokens += taken
            self._step.append((request, done + taken))
        self.computed_tokens += tokens
        seconds += self.drafted(has_prompts=True).drafted_s
        self.ends_s = now_s + seconds if self._step else math.inf
        if self.rows and self._step:  # the prompts behind wait for that, too
            self.free_s += rows_s + costs.weights_s * max(0.0, 1 - tokens / self.profile.step_tokens)

    def _budget(self, beside_s: float) -> PromptBudget:
        """Return what a step has for prompts, whose rows and weights take `beside_s`: as StepBudget's, but for jobs."""
        tokens, costs = self.profile.step_tokens - len(self.rows), self.profile.costs
        if not self.rows:
            return PromptBudget(tokens)
        longest_s = self._stall.stall_s(costs, self.step_s, beside_s) if self.pace_s == math.inf else self.pace_s
        return PromptBudget(tokens, SETTINGS.min_chunk_tokens, longest_s - beside_s, costs)


@dataclass(slots=True)
class Prompt:
    """One that waits, or is read."""

    request: CoarseRequest
    left: float = 1.0  # the share of it that is unread


class CoarseDecodeWorker(CoarseWorker):
    """Prompts are computed one after the other in what the rows leave of each step's time."""

    role = "decode"

    def __init__(self, profile: WorkerProfile, ordered_s: float, ready_s: float, tpot_s: float = math.inf) -> None:
        super().__init__(profile, ordered_s, ready_s, tpot_s)
        self.prompts: deque[Prompt] = deque()

    @property
    def num_prompts(self) -> int:
        return len(self.prompts)

    def read(self, request: CoarseRequest, now_s: float) -> None:
        self.advance(now_s)
        self.prompts.append(Prompt(request))

    def next_end_s(self) -> float:
        if not self.prompts:
            return self._next_row_s()
        steps_a_second, share_a_second = self._pace()
        ends_s = self.now_s + max(0.0, self.prompts[0].left) / share_a_second
        left = max(0.0, self.rows[0][0] - self.step) if self.rows else math.inf
        return min(ends_s, self.now_s + left / steps_a_second) if self.rows else ends_s

    def end_some(self, now_s: float) -> list[CoarseRequest]:
        self.advance(now_s)
        if not self.prompts or (self.rows and self.rows[0][0] - self.step < 1e-6 < self.prompts[0].left):
            return [self._end_row(now_s)]
        request = self.prompts.popleft().request
        request.first_s = now_s
        if request.output_tokens <= 1:
            request.last_s = now_s
        else:
            self.join(request, now_s)
        return [request]

    def advance(self, now_s: float) -> None:
        """Steps go on until `now_s`, at the pace of the last change where prompts are computed beside them."""
        seconds = now_s - self.now_s
        if seconds <= 0 or not self.prompts:
            super().advance(now_s)
            return
        steps_a_second, share_a_second = self._pace()
        self.prompts[0].left -= share_a_second * seconds
        self._advance_steps(steps_a_second * seconds, now_s)

    def _pace(self) -> tuple[float, float]:
        """Steps a second, and how much of the first prompt is read in a second."""
        # Drafts take tokens of prompts, which are few, and none of their time in a step, which becomes longer.
        costs, profile, request = self.profile.costs, self.profile, self.prompts[0].request
        if not self.rows:
            return 0.0, 1 / costs.prefill_s(request.prompt_tokens, 0, profile.step_tokens)
        token_s = costs.prompt_s(request.prompt_tokens) / request.prompt_tokens
        rows_s = self.step_s
        longest_s = rows_s + (profile.step_tokens - len(self.rows)) * token_s
        step_s = max(min(self.pace_s, longest_s), rows_s + SETTINGS.min_chunk_tokens * token_s)
        drafts = self.drafted(has_prompts=True)
        whole_s = step_s + drafts.drafted_s
        return drafts.tokens / whole_s, (step_s - rows_s) / whole_s / (token_s * request.prompt_tokens)
