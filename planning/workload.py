"""Workload and targets of a fleet: lengths of prompts and answers, and the times that are promised."""

from dataclasses import dataclass
from functools import cached_property
from itertools import islice

from twostroke.loadtests.plan import Plan
from twostroke.loadtests.workloads.sessions import sessions
from twostroke.protocol.errors import ConfigError

SAMPLED = 2000  # requests of a load test, that a plan looks at
STRATA = 48
"""Requests that stand for a workload: more change a plan's rates by less than a percent."""


@dataclass(frozen=True)
class Workload:
    """A sample of requests, each as likely as any other. Their arrivals know nothing of each other (Poisson)."""

    name: str
    lengths: tuple[tuple[int, int], ...]  # tokens of a prompt, and of its answer

    def __post_init__(self) -> None:
        if not self.lengths or min(map(min, self.lengths)) < 1:
            raise ConfigError(
                f"--workload {self.name}: no requests, or some without a token; give at least one request"
            )

    @cached_property
    def mean_prompt(self) -> float:
        return sum(prompt for prompt, _ in self.lengths) / len(self.lengths)

    @cached_property
    def mean_answer(self) -> float:
        return sum(answer for _, answer in self.lengths) / len(self.lengths)

    @cached_property
    def longest(self) -> int:
        """Prompt and answer together."""
        return max(prompt + answer for prompt, answer in self.lengths)

    @cached_property
    def mean_context(self) -> float:
        """Mean context of a row at a moment. Long answers are seen more often."""
        return sum(answer * (prompt + answer / 2) for prompt, answer in self.lengths) / self._answers

    @cached_property
    def context_square(self) -> float:
        """The mean square of such a row's context."""
        return sum(answer * (prompt + answer / 2) ** 2 for prompt, answer in self.lengths) / self._answers

    @cached_property
    def held(self) -> tuple[float, float]:
        """Tokens of KV that a row of a decode step takes in the end, and the mean of their squares."""
        mean = sum(answer * (prompt + answer) for prompt, answer in self.lengths) / self._answers
        return mean, sum(answer * (prompt + answer) ** 2 for prompt, answer in self.lengths) / self._answers

    @cached_property
    def _answers(self) -> float:
        return sum(answer for _, answer in self.lengths)

    @cached_property
    def strata(self) -> tuple[tuple[int, int], ...]:
        """A few requests that stand for all: the middle ones of equal parts, by the prompt's length."""
        if len(self.lengths) <= STRATA:
            return self.lengths
        ordered, step = sorted(self.lengths), len(self.lengths) / STRATA
        return tuple(ordered[int((index + 0.5) * step)] for index in range(STRATA))


def workload_sample(plan: Plan, name: str) -> Workload:
    """The lengths of a load test's first requests. Raises LoadTestError."""
    lengths: list[tuple[int, int]] = []
    for session in islice(sessions(plan), SAMPLED):
        before = 0
        for turn in session.turns:
            prompt = before + sum(piece.tokens for piece in turn.prompt)
            lengths.append((prompt, turn.output_tokens))
            before = prompt + turn.output_tokens
    return Workload(name, tuple(lengths[:SAMPLED]))


@dataclass(frozen=True)
class SLOTargets:
    """Times by which first and later tokens should come, and the share of requests that should meet each."""

    ttft_s: float
    tpot_s: float
    ttft_share: float = 0.9
    tpot_share: float = 0.9


def parse_promise(text: str) -> SLOTargets:
    """`ttft_p90_s=0.5,tpot_p90_s=0.05`; any percentile from p50 to p99. Raises ConfigError."""
    found: dict[str, tuple[float, float]] = {}
    for part in text.split(","):
        name, _, value = part.partition("=")
        kind, _, rest = name.strip().partition("_p")
        percentile = rest.removesuffix("_s")
        try:
            share, seconds = int(percentile) / 100, float(value)
        except ValueError:
            share = seconds = 0.0
        if kind not in ("ttft", "tpot") or not rest.endswith("_s") or not 0.5 <= share <= 0.99 or not 0 < seconds < 1e6:
            raise ConfigError(f"--slo {text}: write both of ttft_p90_s=SECONDS,tpot_p90_s=SECONDS; p50 to p99")
        found[kind] = seconds, share
    if found.keys() != {"ttft", "tpot"}:
        raise ConfigError(f"--slo {text}: both ttft_p90_s=SECONDS and tpot_p90_s=SECONDS are needed")
    return SLOTargets(found["ttft"][0], found["tpot"][0], found["ttft"][1], found["tpot"][1])
