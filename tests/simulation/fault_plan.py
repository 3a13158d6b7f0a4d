"""What can go wrong in a simulation, and what does with a seed. Pure."""

import random
from dataclasses import dataclass

FAULTS = (
    "cut_transfers",  # control connections and data links between two workers break, of both roles where there are both
    "cut_links",  # the data links alone break, perhaps in the middle of a chunk
    "part_transfers",  # the two can't reach each other for some time
    "block_transfers",  # the same from the beginning, so that no offer is ever seen
    "silence_transfers",  # control messages between the two get stuck for some time, and nobody is told
    "damage",  # a byte of the next chunks changes under way
    "refuse_prefill",  # the next prefill calls fail before they begin
    "lose_prefill_reply",  # the next prefill calls fail after they have run
    "late_calls",  # the next calls come late, overtaken by what the token channel carries, and by their own end
    "repeat_calls",  # the next calls come twice
    "lose_block_news",  # a router misses what workers tell of their caches, as it can't over TCP, but guards against
    "slow_worker",  # a worker's steps take ten to fifty times as long for some time
    "kill_prefill",  # a prefill worker crashes; another starts later
    "stop_prefill",  # a prefill worker stands still (SIGSTOP), shorter or longer than anybody waits for it, and goes on
    "silence_prefill",  # nothing passes between a router and a prefill worker for some time, and nobody is told
    "drain_prefill",  # a prefill worker drains, perhaps for too short a time, and is replaced
    "kill_decode",  # the same of decode workers
    "stop_decode",
    "silence_decode",
    "drain_decode",
    "fail_engine",  # an engine raises; the worker is replaced
    "cut_channel",  # a router loses its token channel to a worker
    "lose_router",  # a router stands still for ever, and its connections break, or fall silent
)

DECODE_FAULTS = ("kill_decode", "stop_decode", "silence_decode", "drain_decode", "fail_engine", "cut_channel")
"""There is one decode worker more than these in a run: with none left, requests fail, and rightly so."""

DEADLY_FAULTS = ("kill_prefill", "kill_decode", "drain_prefill", "drain_decode", "fail_engine")
"""Two of these may take down both workers that a request was on, which then can't be told from one that does so."""

_OF_PREFILL = (
    "refuse_prefill",
    "lose_prefill_reply",
    "kill_prefill",
    "stop_prefill",
    "silence_prefill",
    "drain_prefill",
)
_WITHOUT_PREFILL = tuple(kind for kind in FAULTS[:-1] if kind not in _OF_PREFILL)

_AT_ONCE = {"block_transfers": 0.0, "lose_router": 0.1}
"""How much earlier these come, to find requests that have just begun."""


@dataclass(frozen=True)
class Fault:
    """Something that goes wrong. `which` picks the workers, and how long it lasts."""

    at_s: float
    kind: str
    which: int


def make_faults(draw: random.Random, *, num_prefill: int, num_routers: int, is_overload: bool) -> tuple[Fault, ...]:
    """Up to three, of which two at most may cost a decode worker, and one a router where there are others.

    None costs a decode worker in an overload: who was refused by all others fails with it, and rightly so.
    """
    faults: list[Fault] = []
    kinds = FAULTS[:-1] if num_prefill else _WITHOUT_PREFILL
    if is_overload:
        kinds = tuple(kind for kind in kinds if kind not in DECODE_FAULTS)
    if num_routers > 1:
        kinds = (*kinds, "lose_router")
    for _ in range(draw.choice((0, 1) if is_overload else (1, 1, 1, 2, 2, 3))):
        if sum(fault.kind in DECODE_FAULTS for fault in faults) == 2:
            kinds = tuple(kind for kind in kinds if kind not in DECODE_FAULTS)
        if any(fault.kind == "lose_router" for fault in faults):
            kinds = tuple(kind for kind in kinds if kind != "lose_router")
        at_s, kind = draw.random() * draw.choice((0.01, 0.1, 0.3)), draw.choice(kinds)
        if kind in _AT_ONCE:
            at_s *= _AT_ONCE[kind]
        faults.append(Fault(at_s, kind, which=draw.randrange(1000)))
    return tuple(sorted(faults, key=lambda fault: fault.at_s))
