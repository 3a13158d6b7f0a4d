"""What a class of requests has asked for and got lately, as one router saw it. Pure: the time is an argument."""

from dataclasses import dataclass, field

from twostroke.router.correction import Correction
from twostroke.router.decaying import DecayingSum

MEMORY_S = 10.0
_OUTPUT_GAIN = 0.05


def _lately() -> DecayingSum:
    return DecayingSum(MEMORY_S)


@dataclass(slots=True)
class ClassHistory:
    """Of one class. `admission.py` reads and writes it."""

    priority: int
    share: float
    offered: DecayingSum = field(default_factory=_lately)  # requests that were judged
    admitted: DecayingSum = field(default_factory=_lately)  # requests
    tokens: DecayingSum = field(default_factory=_lately)  # of the admitted: prompts and expected outputs
    ttft: Correction = field(default_factory=Correction)
    tpot: Correction = field(default_factory=Correction)
    mean_output: float | None = None  # tokens, of the last requests
    admitted_at: float = -1e9
    refused_at: float = -1e9
    is_refusing: bool = False  # the newest request was refused

    def expected_output(self, max_tokens: int) -> float:
        """Tokens that a request will probably have, where it may have `max_tokens`."""
        return float(max_tokens) if self.mean_output is None else min(self.mean_output, float(max_tokens))

    def has_put_out(self, num_tokens: int) -> None:
        """A request has ended with so many tokens."""
        if self.mean_output is None:
            self.mean_output = float(num_tokens)
        self.mean_output += _OUTPUT_GAIN * (num_tokens - self.mean_output)

    def backlog_s(self, now: float) -> float:
        """How long those refused before the newest would take at the pace of those that were let in lately."""
        refused = self.offered.value(now) - self.admitted.value(now) - 1
        return max(0.0, refused) * MEMORY_S / (self.admitted.value(now) + 1)
