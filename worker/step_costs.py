"""The costs of this worker's steps, learnt from steps that have run, and its utilisation by them. No torch.

The form is protocol.stats.StepCosts: seconds = sum of costs x features. The first feature is 1; the last, where the
model has experts, is the part of them that the step's tokens are expected to hit. Costs are fitted by least squares of
the relative error, none below 0. Four rules make that safe on live steps:

- A worker's first steps are left out: they load kernels and touch memory for the first time.
- The last few steps of every kind (steps of about the same size) are kept, and fitted anew each time. Older ones count
  less, but never nothing, so costs that recent steps don't distinguish stay as earlier steps showed them.
- A step far longer or shorter than others of its kind counts as one at the edge of what is usual: a step that records
  a CUDA graph, or is held up by a neighbour, says nothing about the next.
- The costs are tied to each other in the proportions of most machines, more weakly than a single step that can
  distinguish them. Short prompts say nothing about pairs, nor two prompts of one length about the constant. There the
  ties decide. Without them, noise could put costs of long prompts off a hundredfold; the router would then send none
  here, and the worker would never learn better.
"""

import math
from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from twostroke.model.costs.operations import MachineLimits, StepWork
from twostroke.model.step import SequenceStep
from twostroke.protocol.clock import Clock
from twostroke.protocol.stats import StepCosts
from twostroke.worker.constants import UTILIZATION_MARK_S, UTILIZATION_WINDOW_S

COLD_STEPS = 5
FIRST_SAMPLES = 10  # behind the first fit
BATCH = 32  # new steps after which costs are fitted: a fit for each would cost the event loop more
KEPT = 16  # steps of a kind
MAX_KINDS = 64
MEMORY = 100.0  # steps after which one counts 1/e
MIN_WEIGHT = 0.01  # of a step, however old
ROUNDS = 24  # most rounds of fitting
SETTLED = 0.03  # a round that changes no step's expected time by more than this part has found what it could
MAX_EDGE = 20.0  # of the first round: how far off a step may be, as a logarithm
NARROWER = 4.0  # times, once that has settled
EDGE = 4.0  # times the usual error: the least
MIN_ERROR = 0.02  # the usual error is taken to be at least this
MIN_S = 1e-9  # no step takes less
FAMILIAR_STEPS = 4  # steps of a shape after which its kernels are compiled and its costs known
MIN_PART = 0.05  # of what the steps taken in together mostly take: errors are relative to no less than this

# The ties. Reading all weights, which is most of the constant, takes a CPU as long as computing dozens of tokens, and a
# GPU some hundred. What attention adds for each token looked at is 1/10,000 (160M parameters) to 1/30,000 (8B) of what
# a token's products take, and about the same part of reading weights where it is read.
TOKENS_A_BASE = 64.0
PAIR_SHARE = 5e-5
EXPERTS_A_BASE = 10.0  # all experts' weights, over all others: 28 in Mixtral-8x7B, 10 to 20 where experts are many
TIE = 0.3  # how much a tie counts, in steps as far off as it is, for each part of a step that is the usual error

_BASE, _TOKENS, _PAIRS, _ROWS, _CONTEXT, _EXPERTS = range(6)  # the last only where there are experts

Array = np.ndarray[Any, np.dtype[np.float64]]
Sample = tuple[float, ...]  # its number, features, seconds


class StepContent(NamedTuple):
    """The content of a step: the features of StepCosts, except the constant."""

    prompt_tokens: int
    pairs: float  # of a prompt token and a token that it attends to
    rows: int  # requests that decode
    context_tokens: int  # of those, and before chunks of prompts: a step reads each once, however many look at it

    @staticmethod
    def of(batch: Sequence[SequenceStep]) -> "StepContent":
        """Return the content of an engine step. A single token counts as a decoding row, a prompt's last one too."""
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
        """Return the seconds that a step of this content takes."""
        prompts_s = self.prompt_tokens * costs.token_s + self.pairs * costs.pair_s
        reading_s = costs.reading_s(self.prompt_tokens + self.rows)
        return reading_s + prompts_s + costs.decode_s(self.rows, self.context_tokens)

    def prompts_part(self, costs: StepCosts | None) -> float:
        """Return the prompts' part of the step's time, 0 to 1; 1 without decodes, or without known costs."""
        if not self.rows or costs is None:
            return 1.0
        without = StepContent(0, 0.0, self.rows, self.context_tokens)
        return 1.0 - without.expected_s(costs) / max(self.expected_s(costs), MIN_S)


@dataclass(slots=True)
class _Kind:
    """The last steps of a kind. They also stand for those before them."""

    samples: deque[Sample] = field(default_factory=lambda: deque(maxlen=KEPT))
    weight: float = 0.0  # of all its steps, at the newest one

    def add(self, sample: Sample) -> None:
        if self.samples:
            self.weight *= math.exp((self.samples[-1][0] - sample[0]) / MEMORY)
        self.weight += 1.0
        self.samples.append(sample)

    def each(self, now: float) -> float:
        """Return the weight of each of them, when sample `now` is the newest of all."""
        return self.weight / len(self.samples) * math.exp((self.samples[-1][0] - now) / MEMORY)


class StepCostFit:
    """Learns from each step of one worker, cheaply."""

    def __init__(self, expert_share: float = 0.0) -> None:
        """`expert_share` is the model's, as in StepCosts."""
        self._expert_share = expert_share
        self._is_plain = False  # some step was plain
        self._num_told = 0
        self._num_samples = 0
        self._num_pending = 0
        self._shapes: Counter[tuple[int, int, int]] = Counter()  # steps that have run, by their shape
        self._kinds: dict[tuple[int, ...], _Kind] = {}  # the one with the newest sample last
        self._solution: Array | None = None
        self._costs: StepCosts | None = None

    def add(self, content: StepContent, seconds: float, *, is_plain: bool = True) -> None:
        """Add a step's content and time. A step that took no time is ignored.

        A step that is not plain did more than its content says (logits of whole prompts). It counts only before the
        first plain step: otherwise a worker that only scores prompts would have no costs, and an unbounded queue.
        """
        self._shapes[_shape_of(content)] += 1
        if self._is_plain and not is_plain:
            return
        self._is_plain |= is_plain
        self._num_told += 1
        if self._num_told <= COLD_STEPS or seconds < MIN_S:
            return
        self._num_samples += 1
        self._num_pending += 1
        name = _kind_of(content)
        kind = self._kinds[name] = self._kinds.pop(name) if name in self._kinds else _Kind()
        hits: Sample = ()
        if self._expert_share:
            hits = (1.0 - (1.0 - self._expert_share) ** (content.prompt_tokens + content.rows),)
        kind.add((self._num_samples, 1.0, *content, *hits, seconds))
        if len(self._kinds) > MAX_KINDS:
            del self._kinds[next(iter(self._kinds))]
        if self._num_pending >= BATCH or self._num_samples == FIRST_SAMPLES:
            self.take_in()

    def take_in(self) -> None:
        """Fit now, if there are new steps; called before the costs are reported."""
        if not self._num_pending or self._num_samples < FIRST_SAMPLES:
            return
        self._num_pending = 0
        samples = np.array([sample for kind in self._kinds.values() for sample in kind.samples])
        each = np.repeat(
            [kind.each(self._num_samples) for kind in self._kinds.values()],
            [len(kind.samples) for kind in self._kinds.values()],
        )
        weights = np.maximum(each, MIN_WEIGHT)
        self._solution = _fit(samples[:, 1:-1], samples[:, -1], weights, self._solution)
        base, token, pair, row, context, *experts = self._solution.tolist()
        self._costs = StepCosts(
            base,
            token,
            pair,
            row,
            context,
            self._num_samples,
            experts_s=experts[0] if experts else 0.0,
            expert_share=self._expert_share,
        )

    def costs(self) -> StepCosts | None:
        """Return the costs of the last fit; None before the first."""
        return self._costs

    def familiar_s(self, content: StepContent) -> float | None:
        """Return the seconds that a step is expected to take; None where steps of its shape may still be compiled."""
        if self._costs is None or self._shapes[_shape_of(content)] < FAMILIAR_STEPS:
            return None
        return content.expected_s(self._costs)


def _shape_of(content: StepContent) -> tuple[int, int, int]:
    """Return what kernels are compiled for and times are known of: the sizes of a step's parts, to a factor of two, or
    four for context."""
    return content.prompt_tokens.bit_length(), content.rows.bit_length(), content.context_tokens.bit_length() // 2


def _kind_of(content: StepContent) -> tuple[int, ...]:
    """Return the step's kind: steps whose parts differ by less than a factor of two, or four for context."""
    return (
        content.prompt_tokens.bit_length(),
        int(content.pairs).bit_length() // 2,
        content.rows.bit_length(),
        content.context_tokens.bit_length() // 2,
    )


def _fit(features: Array, seconds: Array, weights: Array, start: Array | None) -> Array:
    """Fit in rounds, from the solution `start`, with less and less weight for steps that are far off.

    In the first round all steps count fully: the machine may have changed, or prompts may have a new length.
    """
    solution = _shared_out(features, seconds) if start is None else start
    expected = _expected(features, solution)
    usual_s = _median(seconds, weights)
    edge = MAX_EDGE
    for _ in range(ROUNDS):
        usual_error = max(MIN_ERROR, _median(np.abs(np.log(seconds / expected)), weights))
        least_edge = min(MAX_EDGE, EDGE * usual_error)
        edge = max(edge, least_edge)
        left, right = _equations(features, seconds, expected, edge, weights)
        solution = _least(left + TIE * usual_error * _ties(solution, usual_s), right)
        before, expected = expected, _expected(features, solution)
        if np.abs(np.log(expected / before)).max() < SETTLED:
            if edge == least_edge:
                break
            edge /= NARROWER
    return solution


def _expected(features: Array, solution: Array) -> Array:
    return np.maximum(features @ solution, MIN_S)


def _median(values: Array, weights: Array) -> float:
    order = np.argsort(values)
    summed = np.cumsum(weights[order])
    return float(values[order[np.searchsorted(summed, summed[-1] / 2)]])


def _shared_out(features: Array, seconds: Array) -> Array:
    """Return plausible costs before the first fit: half of a step is the constant, the rest its tokens and rows."""
    costs = np.zeros(features.shape[1])
    kinds = [kind for kind in (_TOKENS, _ROWS) if (features[:, kind] > 0).any()]
    for kind in kinds:
        has_some = features[:, kind] > 0
        costs[kind] = 0.5 / len(kinds) * np.median(seconds[has_some] / features[has_some, kind])
    costs[_BASE] = 0.5 * np.median(seconds)
    if len(costs) > _EXPERTS:
        costs[_BASE] /= 2
        costs[_EXPERTS] = 0.25 * np.median(seconds / features[:, _EXPERTS])
    costs[_PAIRS] = PAIR_SHARE * costs[_TOKENS]
    costs[_CONTEXT] = PAIR_SHARE * costs[_BASE]
    return costs


def _ties(costs: Array, usual_s: float) -> Array:
    """Return what ties add to the left side of the normal equations, given approximate costs.

    Each tie is the squared distance of two costs from their proportion, in units that grow with the cost, so that data
    can move it even a hundredfold. For pairs and context the unit is the cost itself, and no distance counts more than
    a short one: a single odd step can't consist of them. A tiny prompt that was held up seems to consist of expensive
    tokens; so a tenfold cost of tokens or rows counts ten times as much.
    """
    base = max(costs[_BASE], 1e-3 * usual_s)
    token = max(costs[_TOKENS], base / TOKENS_A_BASE)
    ties = [
        (_TOKENS, _BASE, 1 / TOKENS_A_BASE, base),
        (_ROWS, _TOKENS, 1.0, token),
        (_PAIRS, _TOKENS, PAIR_SHARE, token),
        (_CONTEXT, _BASE, PAIR_SHARE, base),
        (_EXPERTS, _BASE, EXPERTS_A_BASE, base),
    ]
    left = np.zeros((len(costs), len(costs)))
    for tied, to, share, cost in ties[: len(costs) - 1]:
        off = np.zeros(len(costs))
        off[tied], off[to] = 1.0, -share
        should = share * cost
        unit = max(should, costs[tied])
        left += np.outer(off, off) / (unit * (unit if tied in (_PAIRS, _CONTEXT) else should))
    return left


def _equations(features: Array, seconds: Array, expected: Array, edge: float, weights: Array) -> tuple[Array, Array]:
    """Return the normal equations of the relative error; times beyond the edge are moved to the edge.

    Errors are relative to the larger of the measured and the expected time. Otherwise a step that is far off would
    outweigh the rest, and a fit that expects far too little would stay there. They are relative to no less than
    MIN_PART of a usual step: of two steps that ended while the event loop was busy, the second seems to have taken no
    time.
    """
    scale = np.maximum(np.maximum(seconds, expected), MIN_PART * np.median(seconds))
    shares = features / scale[:, None]
    edged = np.clip(seconds, expected * np.exp(-edge), expected * np.exp(edge))
    weighted = shares.T * weights
    return weighted @ shares, weighted @ (edged / scale)


def _least(left: Array, right: Array) -> Array:
    """Return the x >= 0 that minimises x . left x / 2 - right . x, for a positive definite `left`.

    Murty's least-index method: of the entries that are negative, or at 0 and pulled up, the last changes sides, until
    there are none. It ends for every positive definite matrix, mostly after one round.
    """
    scale: Array = 1.0 / np.sqrt(np.diag(left))  # the features differ by orders of magnitude
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


class Utilization:
    """Counts the FLOPs and bytes of steps. `shares` are those of the last UTILIZATION_WINDOW_S.

    MFU is the FLOPs that a model's tokens take (Chowdhery et al., PaLM, 2022, appendix B), over what the machine could
    have computed in that time, idle time included. MBU is the same for the bytes of weights and KV that steps read.
    """

    def __init__(self, work: StepWork | None, limits: MachineLimits | None, clock: Clock):
        """The shares are unknown without `work` or `limits`."""
        self._work = work
        self._limits = limits
        self._clock = clock
        self.flops = 0.0
        self.read_bytes = 0.0
        self._marks = deque([(clock(), 0.0, 0.0)])  # times, and both counters then

    def add(self, content: StepContent) -> None:
        """Count a step that has run."""
        if self._work is not None:
            self.flops += self._work.flops(*content)
            self.read_bytes += self._work.read_bytes(content.prompt_tokens, content.rows, content.context_tokens)

    def fields(self) -> dict[str, Any]:
        """Return the fields of WorkerStats that describe utilisation."""
        limits, (mfu, mbu) = self._limits, self.shares() or (None, None)
        return {
            "flops": self.flops,
            "read_bytes": self.read_bytes,
            "peak_flops_per_s": 0.0 if limits is None else limits.gemm,
            "peak_bytes_per_s": 0.0 if limits is None else limits.read,
            "mfu": mfu,
            "mbu": mbu,
        }

    def shares(self) -> tuple[float, float] | None:
        """Return MFU and MBU, 0 to 1; None where they are not known."""
        if self._work is None or self._limits is None:
            return None
        now, marks = self._clock(), self._marks
        while len(marks) > 1 and marks[1][0] <= now - UTILIZATION_WINDOW_S:
            marks.popleft()
        began, flops, read_bytes = marks[0]
        if now - marks[-1][0] >= UTILIZATION_MARK_S:
            marks.append((now, self.flops, self.read_bytes))
        seconds = max(now - began, UTILIZATION_MARK_S)
        return (
            (self.flops - flops) / seconds / self._limits.gemm,
            (self.read_bytes - read_bytes) / seconds / self._limits.read,
        )
