"""Decode steps with drafts: the time of a step, and the tokens that it brings each request. Pure.

**The text.** The share `repeated` of an answer's tokens is in pieces of STRETCH tokens that repeat, as in the exact
simulation. A piece is predicted behind MIN_MATCH tokens that have come before, one further on, and one more that is
drawn while the step is decided. At its end the last prediction is wrong: of m + 1 predictions q = m / (m + 1) is right.

**A request.** A draft of k tokens brings e = q + q^2 + ... + q^k of them. If the part a of the tokens comes in steps
with a draft, an answer takes (1 - a) + a / (1 + e) steps for each of its tokens (Leviathan et al., Fast Inference from
Transformers via Speculative Decoding, ICML 2023, where a is 1). The second summand's part of both is the part of the
steps that have a draft.

**A batch** drafts as `worker/speculator.py` decides: as many tokens as bring the most tokens per second,
where that is worth the wait for the step before, within the room that a step has and the promised time per token. A
mean stands for what differs from step to step and from request to request.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

from twostroke.simulator.deployment import STRETCH
from twostroke.worker.config import SpeculationConfig
from twostroke.worker.profile import WorkerProfile
from twostroke.worker.scheduling.scheduler import DRAFTS_BESIDE_PROMPTS
from twostroke.worker.speculator import GAP_S, MIN_MATCH, SEARCH_S

MAX_DRAFTED = SpeculationConfig().num_speculative_tokens
PREDICTED = STRETCH - MIN_MATCH - 2
"""Tokens of a piece that are predicted."""
RIGHT = PREDICTED / (PREDICTED + 1)
"""Chance that a predicted token is right, where those before it in the draft were."""


@dataclass(frozen=True, slots=True)
class DecodeStep:
    """A decode step of a batch."""

    plain_s: float  # without drafts
    seconds: float
    drafted: float = 0.0  # rows, of all requests
    tokens: float = 1.0  # that it brings each request

    @property
    def token_s(self) -> float:
        """Mean time per token of each request."""
        return self.seconds / self.tokens

    @property
    def drafted_s(self) -> float:
        """Seconds that drafts add."""
        return self.seconds - self.plain_s


def decode_step(
    step_s: Callable[[float], float],
    batch: float,
    repeated: float,
    *,
    most_rows: float = math.inf,
    promised_s: float = math.inf,
) -> DecodeStep:
    """Return the step of `batch` requests of a workload of whose answers the share `repeated` repeats earlier text.

    `step_s` tells the seconds of a step by its rows, of which it may have `most_rows`; `promised_s` is the longest time
    per token that workers plan with.
    """
    plain_s = step_s(batch)
    best = DecodeStep(plain_s, plain_s)
    if repeated <= 0 or batch <= 0:
        return best
    best_rate, right = batch / plain_s, 0.0
    for most in range(1, MAX_DRAFTED + 1):
        # A step that has drafts at all has them of one request or more.
        several = max(1.0, batch * _drafting(repeated, right))
        part = min(1.0, (most_rows - batch) / several - (most - 1))
        if part <= 0:
            break
        right += part * RIGHT**most
        drafting, tokens = _drafting(repeated, right), _tokens(repeated, right)
        several, rows = max(1.0, batch * drafting), most - 1 + part
        seconds = step_s(batch + several * rows)
        # Those without a draft in the step have as much time for it as their steps bring tokens on average.
        if seconds > max(plain_s, promised_s) * (tokens if several < batch else 1 + right):
            break
        # A step behind one with drafts is always waited for.
        is_worth = (batch + RIGHT * several * right) * plain_s > batch * (seconds + GAP_S + SEARCH_S * batch)
        is_worth |= batch * drafting >= 1
        if is_worth and (rate := (batch + several * right) / seconds) > best_rate:
            best_rate, drafted = rate, batch * drafting * rows
            best = DecodeStep(plain_s, step_s(batch + drafted), drafted, tokens)
    return best


def most_tokens(repeated: float) -> float:
    """Return the tokens that a step brings a request where rows cost nothing."""
    return _tokens(repeated, _MOST_RIGHT)


def repeated_share(num_accepted: float, num_generated: float) -> float:
    """Return the share that repeats of answers with so many tokens, of which so many came as drafts.

    Rows are taken to have cost nothing; a busy worker's share is larger.
    """
    # Counters fall where a worker has begun anew.
    accepted = max(0.0, num_accepted / num_generated) if num_generated > 0 else 0.0
    return min(1.0, accepted * (1 + _MOST_RIGHT) / _MOST_RIGHT / _drafted_share(1.0))


def drafted_step(
    profile: WorkerProfile, batch: float, context: float, promised_s: float = math.inf, *, has_prompts: bool = False
) -> DecodeStep:
    """Return a decode step of a worker with so many requests of `context` tokens each, perhaps beside prompts.

    Prompts' own time is not in it.
    """
    costs = profile.costs
    row_s = costs.row_s + context * costs.context_s
    most_tokens = profile.step_tokens // DRAFTS_BESIDE_PROMPTS if has_prompts else profile.step_tokens
    return decode_step(
        lambda rows: costs.reading_s(rows) + rows * row_s,
        batch,
        profile.repeated,
        most_rows=min(profile.max_batch, most_tokens) - has_prompts,
        promised_s=promised_s,
    )


_MOST_RIGHT = sum(RIGHT**place for place in range(1, MAX_DRAFTED + 1))


def _drafted_share(repeated: float) -> float:
    """Return the part of an answer's tokens that comes in steps with a draft: of a piece one more than is predicted."""
    return repeated * (PREDICTED + 1) / STRETCH


def _tokens(repeated: float, right: float) -> float:
    """Return the tokens of a request's step, where a draft brings `right` tokens on average."""
    share = _drafted_share(repeated)
    return 1 / (1 - share + share / (1 + right))


def _drafting(repeated: float, right: float) -> float:
    """Return the part of the steps that have a draft."""
    return _drafted_share(repeated) / (1 + right) * _tokens(repeated, right)
