"""Meaning of a seed whose streams move: long answers, workers that drain or change roles, crowded ones, late prompts.

Pure; the same seed gives the same scenario. Faults are those of scenario.py, spread over the time of the answers.
"""

import random
from dataclasses import replace

from msgspec import structs

from tests.simulation.fake_model import VOCAB
from tests.simulation.scenarios.scenario import (
    DECODE_FAULTS,
    POISON_SHARE,
    Arrival,
    Fault,
    Scenario,
    make_arrivals,
    make_faults,
    make_scenario,
    poisoned,
    with_room_for_windows,
)
from twostroke.router.generate.config import PipelineConfig

_LONGEST_PROMPT = 80
_LONGEST_ANSWER = 120
_LATER = {"block_transfers": 0.0, "lose_router": 0.3}
"""Factors by which faults are put off; all others come while answers are written."""
_ROOMS = {"prefill": (1.3, 2.0, 4.0), "decode": (1.0, 1.3, 2.0, 4.0)}
"""Room in units of what the largest request needs."""
_PATIENT = 6
"""A `which` that lets a drained worker have 5 s."""


def make_moving(seed: int, *, with_faults: bool = False) -> Scenario:
    """The scenario of `seed` with streams that move."""
    draw = random.Random(f"moves of {seed}/{with_faults}")
    base = make_scenario(seed)
    is_poisonous = with_faults and draw.random() < POISON_SHARE
    num_prefill = draw.choice((0, 1, 1, 2))
    arrivals = _arrivals(draw, base)
    faults = _drains(draw, num_prefill)
    if is_poisonous:
        arrivals, faults = poisoned(draw, arrivals, base.num_routers), ()
    elif with_faults:
        num_left = 2 - sum(fault.kind in DECODE_FAULTS for fault in faults)
        faults = (*faults, *_faults(draw, num_prefill, base.num_routers, num_left))
    num_lost = 2 if is_poisonous else sum(fault.kind in DECODE_FAULTS for fault in faults)
    largest = max(len(one.request.token_ids) + one.request.max_tokens for one in arrivals)
    room = {role: draw.choice(rooms) for role, rooms in _ROOMS.items()}
    needed = {"prefill": -(-largest // base.prefill_block_size), "decode": -(-largest // base.decode_block_size)}
    min_pull_tokens = draw.choice((1, 1, 16))

    scenario = replace(
        base,
        num_prefill=num_prefill,
        num_decode=num_lost
        + (1 if num_lost and draw.random() < 0.7 else draw.choice((1, 2) if num_prefill else (2, 3))),
        prefill_blocks=int(needed["prefill"] * room["prefill"]),
        decode_blocks=int(needed["decode"] * room["decode"]),
        swap_blocks=int(needed["decode"] * base.decode.swap_gib),
        prefill=base.prefill.model_copy(
            update={"max_batch": 8, "max_step_tokens": draw.choice((9, 16, 64)), "min_pull_tokens": min_pull_tokens}
        ),
        decode=base.decode.model_copy(
            update={
                "max_batch": 8,
                "max_step_tokens": 8 + draw.choice((1, 15, 60)),
                "min_pull_tokens": min_pull_tokens,
            }
        ),
        link_bytes_per_s=draw.choice((5e3, 5e4, 5e5, 5e6)),
        pipeline=PipelineConfig(
            roles=draw.choice(("flexible", "flexible", "fixed")),
            decodes_alone=draw.random() < 0.7,
            pulls=draw.random() < 0.8,
            pull_min_tokens=draw.choice((1, 32)),
        ),
        arrivals=arrivals,
        faults=tuple(sorted(faults, key=lambda fault: fault.at_s)),
        max_context=_LONGEST_PROMPT + _LONGEST_ANSWER + 40,
        blind_pulls=0.0 if is_poisonous else draw.choice((0.0, 0.0, 0.5)),
        step_s=draw.choice((0.02, 0.05)),
    )
    if scenario.pipeline.roles == "flexible":
        changes = _role_changes(random.Random(f"roles of {seed}/{with_faults}"), num_prefill)
        scenario = replace(scenario, faults=tuple(sorted((*faults, *changes), key=lambda fault: fault.at_s)))
    return with_room_for_windows(scenario, largest) if any(base.windows) else scenario


def _role_changes(draw: random.Random, num_prefill: int) -> tuple[Fault, ...]:
    """Workers that take other roles while answers are written, and perhaps their own again."""
    kinds = ("role_decode", "role_prefill") if num_prefill else ("role_decode",)
    times = sorted(3.0 * draw.random() for _ in range(draw.choice((0, 0, 1, 3))))
    return tuple(Fault(at_s, draw.choice(kinds), which=draw.randrange(1000)) for at_s in times)


def _arrivals(draw: random.Random, base: Scenario) -> tuple[Arrival, ...]:
    """Most at once, and prompts with short answers while these are written."""
    given = make_arrivals(draw, base.num_routers, base.windows, is_crowded=draw.random() < 0.3, is_overload=False)
    arrivals = [_longer(draw, one) for one in given]
    begins = draw.random()
    for number in range(draw.choice((0, 0, 4))):
        token_ids = tuple(draw.randrange(VOCAB) for _ in range(_LONGEST_PROMPT))
        request = structs.replace(
            given[0].request,
            request_id=f"late-{number}",
            token_ids=token_ids,
            num_prompt_tokens=len(token_ids),
            max_tokens=2,
            min_tokens=0,
        )
        arrivals.append(replace(given[0], at_s=begins + 0.3 * number, request=request, cancel_after_s=None))
    return tuple(arrivals)


def _longer(draw: random.Random, one: Arrival) -> Arrival:
    prompt = one.request.token_ids[:_LONGEST_PROMPT]
    request = structs.replace(
        one.request,
        token_ids=prompt,
        num_prompt_tokens=len(prompt),
        max_tokens=draw.choice((5, 60, 90, _LONGEST_ANSWER, _LONGEST_ANSWER)),
        min_tokens=draw.choice((0, 5)),
        stop_token_ids=one.request.stop_token_ids[: draw.choice((0, 0, 1))],
    )
    cancel_after_s = 40 * one.cancel_after_s if one.cancel_after_s is not None and draw.random() < 0.5 else None
    return replace(
        one,
        at_s=one.at_s + draw.choice((0.0, 0.0, 2.0)) * draw.random(),
        request=request,
        cancel_after_s=cancel_after_s,
    )


def _drains(draw: random.Random, num_prefill: int) -> tuple[Fault, ...]:
    """One worker, or none, that drains with some patience while answers are written."""
    kinds = ("drain_decode", "drain_prefill") if num_prefill else ("drain_decode",)
    at_s = 0.2 + 1.5 * draw.random()
    return (Fault(at_s, draw.choice(kinds), which=_PATIENT + 9 * draw.randrange(100)),) if draw.random() < 0.6 else ()


def _faults(draw: random.Random, num_prefill: int, num_routers: int, most_decode: int) -> tuple[Fault, ...]:
    """Faults of scenario.py, later; so many of them, at most, cost a decode worker."""
    faults: list[Fault] = []
    for fault in make_faults(draw, num_prefill=num_prefill, num_routers=num_routers, is_overload=False):
        most_decode -= fault.kind in DECODE_FAULTS
        if most_decode >= 0 or fault.kind not in DECODE_FAULTS:
            faults.append(replace(fault, at_s=2.5 * draw.random() * _LATER.get(fault.kind, 1.0)))
    return tuple(faults)
