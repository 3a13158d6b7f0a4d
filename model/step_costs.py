"""How long this worker's steps take, learnt from those that have run. No torch.

The form is protocol.step_costs.StepCosts: seconds = sum of costs x features, the first feature being 1. It is fitted by
least squares of the relative error, no cost below 0, over normal equations in which older steps count ever less. What
makes that safe on live steps:

- A worker's first steps are left out: they load kernels and touch memory for the first time.
- A step that takes far longer, or less, than its like counts as one at the edge of what is usual: steps that record a
  CUDA graph, or are held up by a neighbour, say nothing about the next. Where all steps are off, the machine has
  changed; then the edge moves out, and the fit follows within some hundred steps.
- What the steps of late don't tell apart, such as the constant and the rows of batches that are all of one size, stays
  in the proportions that it had: a pull towards the last solution, weak beside any step that does tell.
- What was never seen is guessed from what was: a prefill worker sees no rows, a decode worker hardly a prompt.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from model.step import SequenceStep
from protocol.step_costs import StepCosts

COLD_STEPS = 5
FIRST_SAMPLES = 10  # behind the first fit
FIRST_ROUNDS = 6  # of fitting them, and finding out who is far off
BATCH = 32  # steps that are taken in at once: one at a time would cost the event loop more
MEMORY = 100.0  # steps after which one counts 1/e
EDGE = 4.0  # times the usual error
MOST_EDGE = 20.0  # beyond that nothing is cut off
LEAST_ERROR = 0.02  # the usual error is taken to be at least this
LEAST_S = 1e-9  # no step takes less
LEAST_PART = 0.05  # of what the steps taken in together mostly take: errors are relative to no less than this
PULL = 0.01  # towards the last solution, of the greatest weight that a feature has had

# Guesses for what was never seen. Reading all weights, which is most of the constant, takes a CPU as long as computing
# dozens of tokens, and a GPU some hundred. What attention adds for each token looked at is 1/10,000 (160M parameters)
# to 1/30,000 (8B) of what a token's products take, and about the same part of reading weights where it is read.
TOKENS_A_BASE = 128.0
PAIR_SHARE = 5e-5

_BASE, _TOKENS, _PAIRS, _ROWS, _CONTEXT = range(5)

Array = np.ndarray[Any, np.dtype[np.float64]]
Mask = np.ndarray[Any, np.dtype[np.bool_]]


class StepContent(NamedTuple):
    """What is in a step: the features of StepCosts, the constant aside."""

    prompt_tokens: int
    pairs: float  # of a prompt token and a token that it attends to
    rows: int  # requests that decode
    context_tokens: int  # of those, and before chunks of prompts: a step reads each once, however many look at it

    @staticmethod
    def of(batch: Sequence[SequenceStep]) -> "StepContent":
        """The content of an engine step. A single token is a decoding row: a prompt's last one is computed as such."""
        prompt_tokens = rows = context_tokens = 0
        pairs = 0.0
        for one in batch:
            num_tokens = len(one.token_ids)
            if num_tokens == 1:
                rows += 1
                context_tokens += one.start + 1
            else:
                prompt_tokens += num_tokens
                context_tokens += one.start
                pairs += num_tokens * (one.start + num_tokens / 2)
        return StepContent(prompt_tokens, pairs, rows, context_tokens)

    def expected_s(self, costs: StepCosts) -> float:
        """Seconds that a step of this content takes."""
        prompts_s = self.prompt_tokens * costs.token_s + self.pairs * costs.pair_s
        return costs.base_s + prompts_s + costs.decode_s(self.rows, self.context_tokens)

    def prompts_part(self, costs: StepCosts | None) -> float:
        """What part of such a step's time is its prompts': all, where nothing else is in it, or costs are not known."""
        if not self.rows or costs is None:
            return 1.0
        without = StepContent(0, 0.0, self.rows, self.context_tokens)
        return 1.0 - without.expected_s(costs) / max(self.expected_s(costs), LEAST_S)


class StepCostFit:
    """Learns from each step of one worker. Cheap enough to be told of all of them."""

    def __init__(self) -> None:
        self._num_told = 0
        self._num_samples = 0
        self._pending: list[tuple[float, ...]] = []  # features and seconds
        self._left = np.zeros((5, 5))  # of the normal equations: sums of products of features over expected seconds
        self._right = np.zeros(5)  # the same of features and seconds
        self._greatest = np.zeros(5)  # the diagonal of `_left` at its greatest; 0 where nothing was seen
        self._solution = np.zeros(5)
        self._usual_error = 0.0  # mean absolute logarithm of measured over expected seconds
        self._costs: StepCosts | None = None

    def add(self, content: StepContent, seconds: float) -> None:
        """A step with this content has taken so long. One that took no time is not looked at."""
        self._num_told += 1
        if self._num_told <= COLD_STEPS or seconds < LEAST_S:
            return
        self._pending.append((1.0, *content, seconds))
        if len(self._pending) >= (BATCH if self._num_samples else FIRST_SAMPLES):
            samples = np.array(self._pending)
            self._pending.clear()
            self._take_in(samples[:, :5], samples[:, 5])

    def costs(self) -> StepCosts | None:
        """What steps cost, as far as is known now; None before the first fit."""
        return self._costs

    def _take_in(self, features: Array, seconds: Array) -> None:
        if self._num_samples == 0:
            self._begin(features, seconds)
        else:
            self._go_on(features, seconds)
        self._num_samples += len(seconds)
        base, token, pair, row, context = self._solution.tolist()
        self._costs = StepCosts(base, token, pair, row, context, self._num_samples)

    def _begin(self, features: Array, seconds: Array) -> None:
        """Fit the first steps again and again, each time with less regard for those that are far off."""
        is_seen = _with_any(features)
        self._solution = _shared_out(features, seconds)
        for _ in range(FIRST_ROUNDS):
            expected = self._expected(features)
            self._usual_error = max(LEAST_ERROR, float(np.median(np.abs(np.log(seconds / expected)))))
            self._left, self._right = _equations(features, seconds, expected, EDGE * self._usual_error)
            self._greatest = np.diag(self._left).copy()
            self._solve(is_seen)

    def _go_on(self, features: Array, seconds: Array) -> None:
        was_seen = self._greatest > 0
        is_seen = was_seen | _with_any(features)
        expected = self._expected(features)
        error = np.abs(np.log(seconds / expected))
        # A step with much of what is little known may be far off, and is to be learnt from.
        doubt = self._doubt(features / np.maximum(seconds, expected)[:, None], was_seen)
        edge = np.minimum(EDGE * self._usual_error * doubt, MOST_EDGE)
        forgotten = np.exp(-len(seconds) / MEMORY)
        left, right = _equations(features, seconds, expected, edge)
        self._left = forgotten * self._left + left
        self._right = forgotten * self._right + right
        self._greatest = np.maximum(self._greatest, np.diag(self._left))
        usual = float(np.mean(np.minimum(error, edge) / doubt))
        self._usual_error = max(LEAST_ERROR, forgotten * self._usual_error + (1 - forgotten) * usual)
        self._solve(is_seen)

    def _expected(self, features: Array) -> Array:
        return np.maximum(features @ self._solution, LEAST_S)

    def _doubt(self, shares: Array, was_seen: Mask) -> Array:
        """By how much more than usual each step may differ from what is expected, from its features over seconds."""
        left = self._pulled(was_seen)[0]
        scale = _scale(left)
        known = shares[:, was_seen] * scale
        leverage = (known @ np.linalg.inv(left * scale * scale[:, None]) * known).sum(axis=1)
        doubt: Array = np.sqrt(1.0 + leverage)
        doubt[(shares[:, ~was_seen] > 0).any(axis=1)] = np.inf
        return doubt

    def _pulled(self, is_seen: Mask) -> tuple[Array, Array]:
        """The equations of the features that were seen, with the pull towards the last solution."""
        pull = PULL * self._greatest[is_seen]
        return self._left[np.ix_(is_seen, is_seen)] + np.diag(pull), self._right[is_seen] + pull * self._solution[
            is_seen
        ]

    def _solve(self, is_seen: Mask) -> None:
        left, right = self._pulled(is_seen)
        self._solution[is_seen] = _least(left, right)
        _guess_unseen(self._solution, is_seen)


def _with_any(features: Array) -> Mask:
    """Which features some step had."""
    return np.asarray((features > 0).any(axis=0))


def _shared_out(features: Array, seconds: Array) -> Array:
    """Costs that could be, before anything is known: half of a step is the constant, the rest its tokens and rows."""
    costs = np.zeros(5)
    kinds = [kind for kind in (_TOKENS, _ROWS) if (features[:, kind] > 0).any()]
    for kind in kinds:
        has_some = features[:, kind] > 0
        costs[kind] = 0.5 / len(kinds) * np.median(seconds[has_some] / features[has_some, kind])
    costs[_BASE] = 0.5 * np.median(seconds)
    costs[_PAIRS] = PAIR_SHARE * costs[_TOKENS]
    costs[_CONTEXT] = PAIR_SHARE * costs[_BASE]
    return costs


def _guess_unseen(costs: Array, is_seen: Mask) -> None:
    """Fill in what steps so far had nothing of: a lower bound rather than nothing."""
    if not is_seen[_TOKENS]:
        costs[_TOKENS] = max(costs[_ROWS], costs[_BASE] / TOKENS_A_BASE)
    if not is_seen[_PAIRS]:
        costs[_PAIRS] = PAIR_SHARE * costs[_TOKENS]
    if not is_seen[_ROWS]:
        costs[_ROWS] = costs[_TOKENS]
    if not is_seen[_CONTEXT]:
        costs[_CONTEXT] = PAIR_SHARE * costs[_BASE]


def _equations(features: Array, seconds: Array, expected: Array, edge: Array | float) -> tuple[Array, Array]:
    """Normal equations of the relative error, with what is beyond the edge at the edge.

    Relative to the larger of the two times as they are: else one that is far off would outweigh the rest, on whichever
    side it is, and where far too little was expected, the fit would never get away from that. For the same reason not
    relative to a small part of what steps mostly take: of two that ended while the event loop was busy, the second
    seems to have taken no time.
    """
    scale = np.maximum(np.maximum(seconds, expected), LEAST_PART * np.median(seconds))
    shares = features / scale[:, None]
    edged = np.clip(seconds, expected * np.exp(-edge), expected * np.exp(edge))
    return shares.T @ shares, shares.T @ (edged / scale)


def _scale(left: Array) -> Array:
    """What makes the diagonal 1: the features differ by orders of magnitude."""
    scale: Array = 1.0 / np.sqrt(np.diag(left))
    return scale


def _least(left: Array, right: Array) -> Array:
    """The x >= 0 that minimises x . left x / 2 - right . x, for a positive definite `left`.

    Murty's least-index method: of those that are negative, or at 0 and pulled up, the last changes sides, until there
    are none. It ends for every such matrix, mostly at once.
    """
    scale = _scale(left)
    left, right = left * scale * scale[:, None], right * scale
    is_free = np.ones(len(right), bool)
    while True:
        x = np.zeros(len(right))
        x[is_free] = np.linalg.solve(left[np.ix_(is_free, is_free)], right[is_free])
        slope = left @ x - right
        wrong = np.flatnonzero(np.where(is_free, x < 0, slope < -1e-9))
        if not len(wrong):
            return x * scale
        is_free[wrong[-1]] ^= True
