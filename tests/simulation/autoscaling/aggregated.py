"""A worker that reads prompts beside the answers that it writes, in closed form as its neighbours in `workers.py`.

Steps are those of `decode_worker/step_budget.py`: rows first, then chunks of prompts, first come, first served, for as
long as the promise a token allows.
"""

from collections import deque
from dataclasses import dataclass

from tests.simulation.autoscaling.workers import DecodeWorker, Kind, Request

LEAST_CHUNK = 8
"""Prompt tokens of a step, whatever time they take."""
SAFETY = 0.9
"""Of the promised time a token, what a step is planned to take."""


@dataclass(slots=True)
class Prompt:
    """One that waits, or is read."""

    request: Request
    left: float = 1.0  # the share of it that is unread


class AggregatedWorker(DecodeWorker):
    """`join` is told of requests as they come; those whose prompts are read have KV, and `first_s`."""

    def __init__(self, kind: Kind, ordered_s: float, ready_s: float, tpot_s: float) -> None:
        super().__init__(kind, ordered_s, ready_s)
        self.pace_s = tpot_s * SAFETY
        self.prompts: deque[Prompt] = deque()
        self.unread_s = 0.0  # what they take without rows beside them

    @property
    def num_requests(self) -> int:
        """All that are here."""
        return super().num_requests + len(self.prompts)

    def predicted_s(self, prompt_tokens: int) -> float:
        """Until a prompt that comes now is read, as it was at the last change."""
        costs, step_tokens = self.kind.costs, self.kind.step_tokens
        read_s = costs.prefill_s(prompt_tokens, 0, step_tokens) + self.unread_s
        rows_s = costs.base_s + costs.decode_s(len(self.rows), int(self.context)) if self.rows else 0.0
        return read_s / max(1 - rows_s / self.pace_s, 0.05)

    def read(self, request: Request, now_s: float) -> None:
        """A request that has come."""
        self.advance(now_s)
        self.prompts.append(Prompt(request))
        self.unread_s += self._alone_s(request)

    def advance(self, now_s: float) -> None:
        """Steps go on until `now_s`, at the pace of the last change."""
        seconds = now_s - self.now_s
        if seconds <= 0 or not self.prompts:
            super().advance(now_s)
            return
        steps_a_second, share_a_second = self._pace()
        self.step += steps_a_second * seconds
        self.context += steps_a_second * seconds * len(self.rows)
        self.prompts[0].left -= share_a_second * seconds
        self.now_s = now_s

    def next_end_s(self) -> float:
        """When the next row or prompt ends."""
        if not self.prompts:
            return super().next_end_s()
        steps_a_second, share_a_second = self._pace()
        ends_s = self.now_s + max(0.0, self.prompts[0].left) / share_a_second
        if self.rows:
            ends_s = min(ends_s, self.now_s + max(0.0, self.rows[0][0] - self.step) / steps_a_second)
        return ends_s

    def end_one(self, now_s: float) -> Request:
        """The request whose prompt, or whose answer, has ended; `last_s` tells which."""
        self.advance(now_s)
        if not self.prompts or (self.rows and self.rows[0][0] - self.step < 1e-6 < self.prompts[0].left):
            return super().end_one(now_s)
        request = self.prompts.popleft().request
        request.first_s = now_s
        self.unread_s -= self._alone_s(request)
        if request.output_tokens <= 1:
            request.last_s = now_s
        else:
            self.join(request, now_s)
        return request

    def _alone_s(self, request: Request) -> float:
        return self.kind.costs.prefill_s(request.prompt_tokens, 0, self.kind.step_tokens)

    def _pace(self) -> tuple[float, float]:
        """Steps a second, and how much of the first prompt is read in a second."""
        costs, kind, request = self.kind.costs, self.kind, self.prompts[0].request
        if not self.rows:
            return 0.0, 1 / self._alone_s(request)
        token_s = costs.prompt_s(request.prompt_tokens) / request.prompt_tokens
        rows_s = costs.base_s + costs.decode_s(len(self.rows), int(self.context))
        longest_s = rows_s + (kind.step_tokens - len(self.rows)) * token_s
        step_s = max(min(self.pace_s, longest_s), rows_s + LEAST_CHUNK * token_s)
        return 1 / step_s, (step_s - rows_s) / step_s / (token_s * request.prompt_tokens)
