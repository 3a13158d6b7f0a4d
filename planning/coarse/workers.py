"""One prefill and one decode worker whose time goes by in closed form: nothing happens between two changes.

Simpler than the real ones in two ways, both on the slow side or small: a decode worker reserves a request's whole
answer in its KV cache at once instead of preempting, and a draining worker ends what it has begun however long that
takes.
"""

import heapq
import math
from collections import deque
from dataclasses import dataclass

from twostroke.decode_worker.config import DecodeConfig
from twostroke.worker.profile import WorkerProfile


@dataclass(slots=True)
class CoarseRequest:
    """One, and what became of it."""

    at_s: float
    prompt_tokens: int
    output_tokens: int
    first_s: float = math.inf  # when its first token was there
    last_s: float = math.inf
    target: "CoarseDecodeWorker | None" = None  # that is to write the answer, once a router has said so
    is_refused: bool = False

    @property
    def ttft_s(self) -> float:
        """Time to first token from arrival, in seconds."""
        return self.first_s - self.at_s

    @property
    def tpot_s(self) -> float:
        """Mean, from the first token on; 0 for an answer of one."""
        return (self.last_s - self.first_s) / (self.output_tokens - 1) if self.output_tokens > 1 else 0.0


class CoarsePrefillWorker:
    """Prompts share steps, first come first served, as in the live scheduler; each waits for its last one's end."""

    def __init__(self, profile: WorkerProfile, ordered_s: float, ready_s: float) -> None:
        self.profile = profile
        self.ordered_s = ordered_s
        self.ready_s = ready_s
        self.free_s = 0.0
        self.gone_s: float | None = None
        self.ends_s = math.inf  # of the step that runs
        self._queue: deque[tuple[CoarseRequest, int]] = deque()  # and how much of it is computed
        self._step: list[tuple[CoarseRequest, int]] = []  # and how much of it will be

    def end_of(self, tokens: int, now_s: float) -> float:
        """When a prompt that comes now would be done, about."""
        begin_s = max(now_s, self.free_s)
        costs, step_tokens = self.profile.costs, self.profile.step_tokens
        alone_s = costs.prefill_s(tokens, 0, step_tokens)
        if begin_s == now_s:
            return begin_s + alone_s
        return begin_s + alone_s - costs.base_s * (-(-tokens // step_tokens) - tokens / step_tokens)  # in shared steps

    def add(self, request: CoarseRequest, now_s: float) -> None:
        """A prompt comes; where nothing runs, a step begins with it."""
        self.free_s = self.end_of(request.prompt_tokens, now_s)
        self._queue.append((request, 0))
        if self.ends_s == math.inf:
            self._begin(now_s)

    def end_step(self, now_s: float) -> list[CoarseRequest]:
        """The prompts that are computed now; the next step begins."""
        ended = [request for request, done in self._step if done == request.prompt_tokens]
        self._queue.extendleft((request, done) for request, done in self._step if done < request.prompt_tokens)
        self._begin(now_s)
        if self.ends_s == math.inf:
            self.free_s = now_s
        return ended

    def _begin(self, now_s: float) -> None:
        costs, left = self.profile.costs, self.profile.step_tokens
        self._step = []
        seconds = costs.weights_s
        while self._queue and left > 0 and len(self._step) < self.profile.max_batch:
            request, done = self._queue.popleft()
            tokens = min(left, request.prompt_tokens - done)
            seconds += costs.prompt_s(tokens, done) + costs.context_s * done
            left -= tokens
            self._step.append((request, done + tokens))
        self.ends_s = now_s + seconds if self._step else math.inf


@dataclass(slots=True)
class DecodingRow:
    """A request that decodes, or waits to."""

    request: CoarseRequest
    end_step: float = 0.0


SETTINGS = DecodeConfig()
"""The share of a promised time a token, and the smallest chunk of a prompt, that the live scheduler plans with."""


@dataclass(slots=True)
class Prompt:
    """One that waits, or is read."""

    request: CoarseRequest
    left: float = 1.0  # the share of it that is unread


class CoarseDecodeWorker:
    """Continuous batching: t = base + B row + K context a step, K growing by B each; steps are real numbers here.

    `read` is told of requests whose prompts are to be computed here, `join` of those whose KV has come.
    """

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
        self.waiting_tokens = 0  # of their prompts
        self.pace_s = tpot_s * SETTINGS.tpot_safety
        self.prompts: deque[Prompt] = deque()
        self._number = 0

    @property
    def step_s(self) -> float:
        """Time of the running step, in seconds."""
        costs = self.profile.costs
        rows = len(self.rows)
        return costs.reading_s(rows) + rows * costs.row_s + self.context * costs.context_s

    @property
    def num_requests(self) -> int:
        """All that are here, or on their way."""
        return len(self.rows) + len(self.waiting) + self.coming + len(self.prompts)

    def join(self, request: CoarseRequest, now_s: float) -> None:
        """A request whose KV has come."""
        self.advance(now_s)
        self.waiting.append(DecodingRow(request))
        self.waiting_tokens += request.prompt_tokens
        self._admit()

    def read(self, request: CoarseRequest, now_s: float) -> None:
        """A request that has come, and whose prompt is computed here."""
        self.advance(now_s)
        self.prompts.append(Prompt(request))

    def next_end_s(self) -> float:
        """When the next row or prompt ends; infinity without any."""
        left = max(0.0, self.rows[0][0] - self.step) if self.rows else math.inf
        if not self.prompts:
            return self.now_s + self._seconds(left) if self.rows else math.inf
        steps_a_second, share_a_second = self._pace()
        ends_s = self.now_s + max(0.0, self.prompts[0].left) / share_a_second
        return min(ends_s, self.now_s + left / steps_a_second) if self.rows else ends_s

    def end_one(self, now_s: float) -> CoarseRequest:
        """The request whose prompt, or whose answer, has ended; `last_s` tells which."""
        self.advance(now_s)
        if not self.prompts or (self.rows and self.rows[0][0] - self.step < 1e-6 < self.prompts[0].left):
            return self._end_row(now_s)
        request = self.prompts.popleft().request
        request.first_s = now_s
        if request.output_tokens <= 1:
            request.last_s = now_s
        else:
            self.join(request, now_s)
        return request

    def _end_row(self, now_s: float) -> CoarseRequest:
        end_step, _, row = heapq.heappop(self.rows)
        self.step = end_step
        request = row.request
        self.context -= request.prompt_tokens + request.output_tokens
        self.held_tokens -= request.prompt_tokens + request.output_tokens
        if not self.rows:
            self.context = 0.0
        request.last_s = now_s
        self._admit()
        return request

    def advance(self, now_s: float) -> None:
        """Steps go on until `now_s`, at the pace of the last change where prompts are computed beside them."""
        seconds = now_s - self.now_s
        if seconds <= 0:
            return
        if self.prompts:
            steps_a_second, share_a_second = self._pace()
            steps = steps_a_second * seconds
            self.prompts[0].left -= share_a_second * seconds
        else:
            steps = self._steps(seconds) if self.rows else 0.0
        self.step += steps
        self.context += steps * len(self.rows)
        self.now_s = now_s

    def _admit(self) -> None:
        while self.waiting and len(self.rows) < self.profile.max_batch:
            request = self.waiting[0].request
            tokens = request.prompt_tokens + request.output_tokens
            if self.rows and self.held_tokens + tokens > self.profile.kv_tokens:
                return
            row = self.waiting.popleft()
            self.waiting_tokens -= request.prompt_tokens
            row.end_step = self.step + request.output_tokens - 1
            self._number += 1
            heapq.heappush(self.rows, (row.end_step, self._number, row))
            self.held_tokens += tokens
            self.context += request.prompt_tokens + 1

    def _seconds(self, steps: float) -> float:
        return steps * (self.step_s + self.profile.costs.context_s * len(self.rows) * steps / 2)

    def _steps(self, seconds: float) -> float:
        first_s, growth_s = self.step_s, self.profile.costs.context_s * len(self.rows)
        return 2 * seconds / (first_s + math.sqrt(first_s * first_s + 2 * growth_s * seconds))

    def _pace(self) -> tuple[float, float]:
        """Steps a second, and how much of the first prompt is read in a second."""
        costs, profile, request = self.profile.costs, self.profile, self.prompts[0].request
        if not self.rows:
            return 0.0, 1 / costs.prefill_s(request.prompt_tokens, 0, profile.step_tokens)
        token_s = costs.prompt_s(request.prompt_tokens) / request.prompt_tokens
        rows_s = self.step_s
        longest_s = rows_s + (profile.step_tokens - len(self.rows)) * token_s
        step_s = max(min(self.pace_s, longest_s), rows_s + SETTINGS.min_chunk_tokens * token_s)
        return 1 / step_s, (step_s - rows_s) / step_s / (token_s * request.prompt_tokens)
