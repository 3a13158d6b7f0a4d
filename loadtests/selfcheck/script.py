"""What the stub server does with a request: known to both sides, since it follows from the prompt alone. Pure."""

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

from twostroke.loadtests.plan import SLO
from twostroke.loadtests.workloads.seeds import seed_of

KEY_TOKENS = 16  # of the prompt's beginning, that tell requests apart

Ending = Literal["whole", "broken", "silent"]
"""broken: the connection is closed before the stream's end; silent: nothing more comes, and it stays open."""


@dataclass(frozen=True)
class Script:
    """One answer. Instants are planned; the stub stamps what they really were."""

    status: int = 200  # of HTTP; all but 200 are answered at once
    ttft_s: float = 0.0  # from the request's last byte
    gaps_s: tuple[float, ...] = ()  # between tokens, of which there is one more
    ending: Ending = "whole"

    def meets(self, slo: SLO) -> bool:
        """As the definitions have it: only a whole answer counts, and one token has no time between tokens."""
        if self.status != 200 or self.ending != "whole":
            return False
        in_time = slo.ttft_s is None or self.ttft_s <= slo.ttft_s
        flows = slo.tpot_s is None or not self.gaps_s or sum(self.gaps_s) / len(self.gaps_s) <= slo.tpot_s
        return in_time and flows


def key_of(prompt: Sequence[int]) -> int:
    """What tells a prompt from others."""
    return seed_of("script", *prompt[:KEY_TOKENS])


def steady(draw: random.Random, tokens: int) -> Script:
    """A healthy server: 50 tokens a second, unevenly, and never two streams in step."""
    return Script(ttft_s=draw.uniform(0.05, 0.5), gaps_s=tuple(draw.uniform(0.005, 0.035) for _ in range(tokens - 1)))


def immediate(draw: random.Random, tokens: int) -> Script:
    """As fast as can be: whoever finds this server slow is slow."""
    return Script(ttft_s=0.001, gaps_s=(0.001,) * (tokens - 1))


# What meets MIXED_SLO does so with more than half a second to spare, and what misses it has twice what is allowed.
MIXED_SLO = SLO(ttft_s=1.0, tpot_s=0.2)
MIXED_LIMIT_S = 4.0  # after which the client gives up a silent answer
_FAST = (0.05, 0.01)
_MIXED: tuple[tuple[int, Script], ...] = (
    (8, Script(ttft_s=_FAST[0], gaps_s=(_FAST[1],) * 5)),
    (2, Script(ttft_s=0.3, gaps_s=(0.05,) * 4)),
    (2, Script(ttft_s=_FAST[0])),  # one token
    (1, Script(ttft_s=2.0)),  # one, late
    (2, Script(ttft_s=2.0, gaps_s=(_FAST[1],) * 5)),
    (2, Script(ttft_s=_FAST[0], gaps_s=(0.4,) * 4)),
    (1, Script(ttft_s=_FAST[0], gaps_s=(0.001,) * 4 + (2.1,))),  # a stall alone spoils the mean
    (1, Script(status=429)),
    (1, Script(status=503)),
    (1, Script(status=500)),
    (1, Script(ttft_s=_FAST[0], gaps_s=(_FAST[1],) * 5, ending="broken")),
    (1, Script(ttft_s=_FAST[0], gaps_s=(_FAST[1],) * 2, ending="silent")),
)


def mixed(draw: random.Random, tokens: int) -> Script:
    """All that can become of a request, whatever number of tokens it asks for."""
    return draw.choices([script for _, script in _MIXED], [weight for weight, _ in _MIXED])[0]


SCENARIOS: dict[str, Callable[[random.Random, int], Script]] = {
    "steady": steady,
    "immediate": immediate,
    "mixed": mixed,
}


def script_of(scenario: str, key: int, tokens: int) -> Script:
    """What becomes of the request with this key, which asks for `tokens` tokens."""
    return SCENARIOS[scenario](random.Random(key), tokens)
