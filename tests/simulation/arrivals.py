"""The requests of a scenario, and what their clients do. Pure."""

import random
from dataclasses import dataclass, replace

from msgspec import structs

from tests.simulation.fake_model import POISON, VOCAB, expected_tokens
from twostroke.protocol.requests import GenerateRequest, Promise, SamplingParams

MAX_PROMPT = 200

PROMISES = (
    Promise(),
    Promise(),
    Promise("interactive", priority=1, share=0.2, ttft_left_s=0.5, tpot_s=0.05),
    Promise("batch", priority=-1, share=0.1),
)


@dataclass(frozen=True)
class Arrival:
    """A request, and what its client does. Times in virtual seconds."""

    at_s: float
    router: int
    request: GenerateRequest
    cancel_after_s: float | None  # the client leaves so long after it came, unless it has its answer by then

    @property
    def is_poison(self) -> bool:
        """Whether it kills the engine that computes it."""
        return POISON in self.request.token_ids


def make_arrivals(
    draw: random.Random, num_routers: int, num_layers: int, *, is_crowded: bool, is_overload: bool
) -> tuple[Arrival, ...]:
    """`is_crowded`: many short prompts with long answers. `is_overload`: more of all kinds, and all at once."""
    stems = [_tokens(draw, draw.randint(1, 120)) for _ in range(2)]
    spread_s = 0.0 if is_overload else draw.choice((0.0, 0.02, 0.2))
    arrivals: list[Arrival] = []
    for _ in range(draw.randint(2, 4) * (2 if is_overload else 1)):
        prompt = (draw.choice(stems) if draw.random() < 0.6 else ()) + _tokens(draw, draw.choice((1, 5, 20, 80)))
        prompt = prompt[: draw.choice((8, 16) if is_crowded else (MAX_PROMPT, MAX_PROMPT, 48, 16))]
        at_s = draw.random() * spread_s
        max_tokens = 40 if is_crowded else draw.choice((1, 2, 5, 12, 40))
        stop = tuple(draw.sample(range(VOCAB), draw.choice((0, 1) if is_crowded else (0, 1, 4))))
        promise = draw.choice(PROMISES)
        for _ in range(draw.choice((1, 1, 1, 2))):  # choices of one prompt
            arrivals.append(
                Arrival(
                    at_s=at_s,
                    router=draw.randrange(num_routers),
                    request=GenerateRequest(
                        request_id=f"template-{len(arrivals)}",
                        router_id="",
                        token_ids=prompt,
                        num_prompt_tokens=len(prompt),
                        sampling=SamplingParams(
                            seed=draw.randrange(1000), presence_penalty=draw.choice((0.0, 0.0, 0.0, 0.5))
                        ),
                        max_tokens=max_tokens,
                        min_tokens=draw.choice((0, 0, min(3, max_tokens))),
                        stop_token_ids=stop,
                        cache_salt=draw.choice((b"", b"", b"tenant")),
                        promise=promise,
                    ),
                    cancel_after_s=draw.choice((0.002, 0.02, 0.1)) * draw.random() if draw.random() < 0.3 else None,
                )
            )
    for first in arrivals[:2] if draw.random() < 0.5 else ():
        arrivals.append(_next_turn(draw, first, num_layers, f"template-{len(arrivals)}"))
    return tuple(arrivals)


def poisoned(draw: random.Random, arrivals: tuple[Arrival, ...], num_routers: int) -> tuple[Arrival, ...]:
    """`arrivals` and one that kills engines, which comes again later, by another router if there is one."""
    prompt = _tokens(draw, draw.choice((0, 5, 40)))
    poison = replace(
        arrivals[0],
        at_s=draw.random() * 0.05,
        request=structs.replace(
            arrivals[0].request,
            request_id="poison-0",
            token_ids=(*prompt, POISON, 1),
            num_prompt_tokens=len(prompt) + 2,
        ),
        cancel_after_s=None,
    )
    again = replace(
        poison,
        at_s=5.0,
        router=(poison.router + 1) % num_routers,
        request=structs.replace(poison.request, request_id="poison-1"),
    )
    return (*arrivals, poison, again)


def asked_again(draw: random.Random, arrivals: tuple[Arrival, ...]) -> tuple[Arrival, ...]:
    """`arrivals` and some of them once more, when somebody has their KV."""
    again = [
        replace(
            first,
            at_s=first.at_s + 0.02 + 0.3 * draw.random(),
            request=structs.replace(first.request, request_id=f"again-{number}"),
        )
        for number, first in enumerate(arrivals[:5])
    ]
    return (*arrivals, *again)


def _next_turn(draw: random.Random, first: Arrival, num_layers: int, name: str) -> Arrival:
    """A request that goes on from another's answer, perhaps before that has come to its end."""
    said = (*first.request.token_ids, *expected_tokens(first.request, num_layers))
    prompt = (*said, *_tokens(draw, draw.choice((1, 10))))[:MAX_PROMPT]
    return replace(
        first,
        at_s=first.at_s + draw.choice((0.05, 0.2, 0.5)),
        request=structs.replace(
            first.request, request_id=name, token_ids=prompt, num_prompt_tokens=len(prompt), max_tokens=5, min_tokens=0
        ),
    )


def _tokens(draw: random.Random, length: int) -> tuple[int, ...]:
    return tuple(draw.randrange(VOCAB) for _ in range(length))
