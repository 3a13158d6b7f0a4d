"""Synthetic traces, seeded: conversations that grow turn by turn from shared system prompts, and prompts all different.

Shaped after Mooncake's conversation trace (log-normal lengths, whole prefixes that come again), at a sixth of its
lengths, which is what the small model can take.
"""

import math
import random
from collections.abc import Callable
from dataclasses import dataclass

from twostroke.simulator.deployment import ANSWER, TracedRequest

VOCABULARY = 32_000
MAX_PROMPT = 6_000


@dataclass(frozen=True)
class Conversations:
    """Sessions that come at random, each a number of turns; a turn's prompt is all that was said, and something new."""

    system_prompts: int = 8  # of which each session has one, the first more often than the last
    system_tokens: float = 700.0  # medians of log-normal lengths, here and below
    said_tokens: float = 160.0  # by the user in a turn
    answer_tokens: float = 60.0
    turns: float = 5.0  # mean of a geometric number
    think_s: float = 12.0  # mean time between turns


def conversations(seed: int, *, num_requests: int, rate_per_s: float, shape: Conversations) -> list[TracedRequest]:
    """A trace of so many requests, at `rate_per_s` of them on average. Times are fixed: nobody waits for an answer."""
    draw = random.Random(f"conversations {seed}")
    systems = [_tokens(draw, _length(draw, shape.system_tokens, 0.7)) for _ in range(shape.system_prompts)]
    weights = [1 / rank for rank in range(1, len(systems) + 1)]
    requests: list[TracedRequest] = []
    begins_s = -shape.turns * shape.think_s  # so that the first sessions are under way when the trace begins
    while begins_s < (num_requests / rate_per_s):
        begins_s += draw.expovariate(rate_per_s / shape.turns)
        at_s, said = begins_s, draw.choices(systems, weights)[0]
        while True:
            said = (*said, *_tokens(draw, _length(draw, shape.said_tokens, 1.0)))
            num_output_tokens = _length(draw, shape.answer_tokens, 0.6)
            if len(said) > MAX_PROMPT:
                break
            requests.append(TracedRequest(at_s, said, num_output_tokens))
            if draw.random() < 1 / shape.turns:
                break
            said = (*said, *([ANSWER] * num_output_tokens))
            at_s += draw.expovariate(1 / shape.think_s)
    requests = sorted((one for one in requests if one.at_s >= 0), key=lambda one: one.at_s)
    return requests[:num_requests]


def strangers(
    seed: int, *, num_requests: int, rate_per_s: float, prompt_tokens: float = 1000.0, sigma: float = 0.8
) -> list[TracedRequest]:
    """A trace in which no two prompts begin alike; `prompt_tokens` and `sigma` of a log-normal length."""
    draw = random.Random(f"strangers {seed}")
    at_s = 0.0
    requests: list[TracedRequest] = []
    for _ in range(num_requests):
        at_s += draw.expovariate(rate_per_s)
        prompt = _tokens(draw, min(MAX_PROMPT, _length(draw, prompt_tokens, sigma)))
        requests.append(TracedRequest(at_s, prompt, _length(draw, 60.0, 0.6)))
    return requests


def _length(draw: random.Random, median: float, sigma: float) -> int:
    return max(2, round(draw.lognormvariate(math.log(median), sigma)))


def _tokens(draw: random.Random, length: int) -> tuple[int, ...]:
    return tuple(draw.choices(range(VOCABULARY), k=length))


TRACES: dict[str, Callable[[int, int], list[TracedRequest]]] = {
    "conversations": lambda seed, count: conversations(seed, num_requests=count, rate_per_s=8.0, shape=Conversations()),
    "strangers": lambda seed, count: strangers(seed, num_requests=count, rate_per_s=4.2),
}
"""Traces by seed and number of requests, at rates that keep prefill workers busy for 0.7 of their time under round
robin."""
