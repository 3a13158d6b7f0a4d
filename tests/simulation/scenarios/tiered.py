"""Meaning of a seed whose workers have KV tiers: prompts that come again, workers that restart, storage that fails.

Pure; the same seed gives the same scenario. Faults are those of scenario.py, and those of storage.
"""

import random
from dataclasses import replace

from msgspec import structs

from tests.simulation.scenarios.scenario import (
    DECODE_FAULTS,
    Arrival,
    Fault,
    Scenario,
    make_arrivals,
    make_scenario,
    with_wishes,
)
from twostroke.simulator.sim_fleet import TierPlan

STORAGE_FAULTS = (
    "fail_read",
    "fail_write",
    "full",  # the disk has no room, though the quota is kept
    "lose",  # a blob is gone
    "flip",  # a bit of a blob is another one
    "truncate",
    "swap",  # another blob comes in its place
    "tear",  # half a blob is stored
    "hang_storage",  # no call of one storage ends for some time
)


def make_tiered(seed: int, *, with_faults: bool = False) -> Scenario:
    """The scenario of `seed` with tiers."""
    draw = random.Random(f"tiers of {seed}/{with_faults}")
    base = make_scenario(seed)
    block_size = base.decode_block_size
    arrivals = make_arrivals(draw, base.num_routers, base.windows, is_crowded=False, is_overload=False)
    again = _again(draw, arrivals)
    faults: list[Fault] = []
    if with_faults:
        storage = [Fault(draw.random() * 2.5, draw.choice(STORAGE_FAULTS), draw.randrange(1000)) for _ in range(4)]
        faults += storage
    # Restarts are the reason for tiers: a worker of each role, between the second use and the third.
    for kind in (("kill_prefill", "drain_decode"), ("drain_prefill", "kill_decode"))[draw.randrange(2)]:
        if base.num_prefill or kind.endswith("_decode"):
            faults.append(Fault(1.5 + 0.2 * draw.random(), kind, draw.randrange(1000)))
    largest = max(len(one.request.token_ids) + one.request.max_tokens for one in again)
    needed = -(-largest // block_size)
    rows = draw.choice((1, 2, 3))
    return replace(
        base,
        prefill_block_size=block_size,
        num_decode=sum(fault.kind in DECODE_FAULTS for fault in faults) + 1,
        prefill_blocks=int(needed * draw.choice((1.0, 2.0)) * (1 + len(base.windows))),
        decode_blocks=int(needed * draw.choice((1.0, 2.0)) * (1 + len(base.windows))),
        prefill=base.prefill.model_copy(update={"min_pull_tokens": 1}),
        decode=base.decode.model_copy(update={"min_pull_tokens": 1}),
        link_bytes_per_s=5e6,
        step_s=draw.choice((0.002, 0.01)),
        arrivals=with_wishes(seed, again),
        faults=tuple(sorted(faults, key=lambda fault: fault.at_s)),
        blind_pulls=0.0,
        is_overload=False,
        tiers=TierPlan(
            object_tokens=rows * block_size,
            host_blocks=int((rows + needed * draw.choice((0.3, 1.0, 2.0))) * (1 + len(base.windows))),
            has_disk=draw.random() < 0.8,
            disk_bytes=draw.choice((2_000, 20_000, 10**9)),
            has_shared=draw.random() < 0.5,
            call_s=draw.choice((0.0, 0.001, 0.01)),
        ),
    )


def _again(draw: random.Random, arrivals: tuple[Arrival, ...]) -> tuple[Arrival, ...]:
    """Return the arrivals, and each twice more: once soon, and once when workers have restarted."""
    return tuple(
        replace(
            one,
            at_s=one.at_s + at_s + 0.3 * draw.random(),
            request=structs.replace(one.request, request_id=f"{one.request.request_id}-{number}"),
            cancel_after_s=one.cancel_after_s if number else None,
        )
        for number, at_s in enumerate((0.0, 0.8, 2.0))
        for one in arrivals
    )
