"""Meaning of a seed: workers, pools, requests, cancels and faults. Pure; the same seed gives the same scenario."""

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass, replace

from msgspec import structs

from tests.simulation.fake_model import POISON, VOCAB, expected_tokens
from twostroke.decode_worker.config import DecodeConfig
from twostroke.prefill_worker.config import PrefillConfig
from twostroke.protocol.kv_layout import group_layers
from twostroke.protocol.requests import GenerateRequest, Promise, SamplingParams
from twostroke.router.generate.config import PipelineConfig
from twostroke.simulator.sim_fleet import FleetPlan
from twostroke.worker.token_server import TokenServerConfig

# --- requests, and what their clients do ---


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
        """Return whether the request kills the engine that computes it."""
        return POISON in self.request.token_ids


def make_arrivals(
    draw: random.Random, num_routers: int, windows: Sequence[int], *, is_crowded: bool, is_overload: bool
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
        for choice in range(draw.choice((1, 1, 1, 2))):  # choices of one prompt: the second when that is computed
            arrivals.append(
                Arrival(
                    at_s=at_s + 0.02 * choice,
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
        arrivals.append(_next_turn(draw, first, windows, f"template-{len(arrivals)}"))
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
            token_ids=(*prompt, 1, POISON),  # the last token is computed whatever layers attend to
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


def with_wishes(seed: int, arrivals: tuple[Arrival, ...]) -> tuple[Arrival, ...]:
    """`arrivals`, of which some want their prompts' KV kept, in two seeds of three."""
    draw = random.Random(f"wishes of {seed}")
    share = draw.choice((0.0, 0.5, 0.8))
    return tuple(
        replace(
            one,
            request=structs.replace(
                one.request,
                client=one.request.cache_salt,
                keep_s=draw.choice((0.02, 0.5, 300.0)) if draw.random() < share else 0.0,
            ),
        )
        for one in arrivals
    )


def _next_turn(draw: random.Random, first: Arrival, windows: Sequence[int], name: str) -> Arrival:
    """A request that goes on from another's answer, perhaps before that has come to its end."""
    said = (*first.request.token_ids, *expected_tokens(first.request, windows))
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


# --- faults ---


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
    "hang_engine",  # a step does not end; its worker notices, and is replaced
    "cut_channel",  # a router loses its token channel to a worker
    "lose_router",  # a router stands still for ever, and its connections break, or fall silent
)

DECODE_FAULTS = (
    "kill_decode",
    "stop_decode",
    "silence_decode",
    "drain_decode",
    "fail_engine",
    "hang_engine",
    "cut_channel",
)
"""There is one decode worker more than these in a run: with none left, requests fail, and rightly so."""

DEADLY_FAULTS = ("kill_prefill", "kill_decode", "drain_prefill", "drain_decode", "fail_engine", "hang_engine")
"""Two of these may take down both workers that a request was on, which then can't be told from one that does so."""

_OF_PREFILL = (
    "refuse_prefill",
    "lose_prefill_reply",
    "kill_prefill",
    "stop_prefill",
    "silence_prefill",
    "drain_prefill",
)
_DRAWN = tuple(kind for kind in FAULTS[:-1] if kind != "hang_engine")  # half of the engines that fail hang instead
_WITHOUT_PREFILL = tuple(kind for kind in _DRAWN if kind not in _OF_PREFILL)

_AT_ONCE = {"block_transfers": 0.0, "lose_router": 0.1}
"""Factor by which these come earlier, to find requests that have just begun."""


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
    kinds = _DRAWN if num_prefill else _WITHOUT_PREFILL
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
        which = draw.randrange(1000)
        if kind == "fail_engine" and which // 2 % 2:  # `which % 2` chooses the role
            kind = "hang_engine"
        faults.append(Fault(at_s, kind, which))
    return tuple(sorted(faults, key=lambda fault: fault.at_s))


# --- all of it ---


MAX_CONTEXT = 240
ROUTER_LEASE_S = 4.0
MAX_STEP_S = 20.0  # above the longest step at a worker that a fault slows down
POISON_SHARE = 0.1


@dataclass(frozen=True, kw_only=True)
class Scenario(FleetPlan):
    """One simulated run."""

    num_routers: int
    num_prefill: int  # 0: aggregated
    num_decode: int
    pipeline: PipelineConfig
    link_bytes_per_s: float
    arrivals: tuple[Arrival, ...]
    faults: tuple[Fault, ...]
    is_overload: bool  # more requests than queues hold: some are refused
    max_context: int = MAX_CONTEXT
    step_s: float = 0.001  # of an engine's step, its tokens aside
    blind_pulls: float = 0.0  # share of the prompts that decode workers read alone which are pulled from anybody


def make_scenario(seed: int, *, with_faults: bool = False) -> Scenario:
    """The scenario of `seed`."""
    draw = random.Random(f"{seed}/{with_faults}")
    prefill_block_size = decode_block_size = draw.choice((1, 2, 3, 4, 8, 16))
    if draw.random() < 0.3:
        prefill_block_size = draw.choice((1, 2, 3, 4, 8, 16))
    num_prefill = draw.choice((0, 0, 1, 1, 1, 2, 2))
    max_batch = draw.choice((1, 2, 3, 8))
    windows = _windows(seed, draw.choice((1, 2, 3)))
    if any(windows):  # which need the same
        prefill_block_size = decode_block_size
    swap_share = draw.choice((0.0, 0.5, 2.0, 2.0))
    is_crowded = draw.random() < 0.2  # many short prompts with long answers: blocks run out while all decode
    if is_crowded:
        max_batch = 8
    num_routers = draw.choice((1, 1, 2))
    is_overload = with_faults and draw.random() < 0.1
    is_poisonous = with_faults and not is_overload and draw.random() < POISON_SHARE
    if is_poisonous:
        num_routers = draw.choice((1, 2, 2))
    arrivals = make_arrivals(draw, num_routers, windows, is_crowded=is_crowded, is_overload=is_overload)
    # Whoever waits for a prefix has not got on, and is taken for poison where its workers die of some.
    blind_pulls = 0.0 if is_poisonous else draw.choice((0.0, 0.5, 1.0))
    is_asked_again = blind_pulls > 0 and num_prefill == 0
    if is_asked_again:
        arrivals = asked_again(draw, arrivals)
    faults: tuple[Fault, ...] = ()
    if is_poisonous:
        arrivals = poisoned(draw, arrivals, num_routers)
    elif with_faults:
        faults = make_faults(draw, num_prefill=num_prefill, num_routers=num_routers, is_overload=is_overload)
    num_lost = 2 if is_poisonous else sum(fault.kind in DECODE_FAULTS for fault in faults)
    max_waiting = draw.choice((1, 2, 4)) if is_overload else 1024
    largest = max(len(one.request.token_ids) + one.request.max_tokens for one in arrivals)
    prefill_needed, decode_needed = -(-largest // prefill_block_size), -(-largest // decode_block_size)
    scenario = Scenario(
        seed=seed,
        windows=windows,
        prefill_block_size=prefill_block_size,
        decode_block_size=decode_block_size,
        transports=draw.choice((("memory",), ("memory_pull", "memory"), ("memory_pull",))),
        num_routers=num_routers,
        num_prefill=num_prefill,
        num_decode=num_lost + 1 if num_lost else draw.choice((1, 1, 2) if num_prefill else (1, 2, 3)),
        prefill_blocks=int(prefill_needed * draw.choice((1.0, 1.3, 2.0, 4.0))),
        decode_blocks=int(decode_needed * draw.choice((1.0, 1.2) if is_crowded else (1.0, 1.1, 1.5, 2.0, 4.0))),
        swap_blocks=int(decode_needed * swap_share),
        prefill=PrefillConfig(
            max_step_tokens=draw.choice((5, 16, 33, 64, 256)),
            max_batch=draw.choice((1, 2, 8)),
            max_waiting=max_waiting,
            min_pull_tokens=draw.choice((1, 64)),
            integrity_interval_s=0.0,
            max_step_s=MAX_STEP_S,
            token_channel=TokenServerConfig(lease_s=ROUTER_LEASE_S),
        ),
        decode=DecodeConfig(
            max_step_tokens=max_batch + draw.choice((0, 1, 15, 60)),
            max_batch=max_batch,
            watermark=draw.choice((0.0, 0.05, 0.2)),
            preemption=draw.choice(("auto", "swap", "swap", "auto")) if swap_share else "auto",
            swap_gib=swap_share,
            run_ahead=draw.random() < 0.8,
            router_wait_s=4.0 if seed % 2 else 10_000.0,  # the latter ends no wait: somebody must tell
            max_waiting=max_waiting,
            min_pull_tokens=draw.choice((1, 1, 64)),
            integrity_interval_s=0.0,
            max_step_s=MAX_STEP_S,
            token_channel=TokenServerConfig(lease_s=ROUTER_LEASE_S),
        ),
        pipeline=PipelineConfig(
            roles="fixed" if seed % 4 == 1 else "flexible",
            pulls=draw.random() < 0.8,
            pull_min_tokens=draw.choice((1, 32)),
            # Else what comes again goes where its KV is, and has nothing to pull.
            policy="round_robin" if is_asked_again and draw.random() < 0.5 else "kv_aware",
        ),
        max_chunk_bytes=draw.choice((1, 64, 1024, 65536)),
        link_bytes_per_s=draw.choice((5e3, 5e4, 5e6) if is_asked_again else (5e4, 5e5, 5e6)),
        arrivals=with_wishes(seed, arrivals),
        faults=faults,
        is_overload=is_overload,
        blind_pulls=blind_pulls,
    )
    return with_room_for_windows(scenario, largest) if any(windows) else scenario


def _windows(seed: int, num_layers: int) -> tuple[int, ...]:
    """Return the layers' windows. In two seeds of five some layers see the last tokens alone, or their chunk's, in
    some all do."""
    draw = random.Random(f"windows of {seed}")
    if draw.random() < 0.6:
        return (0,) * num_layers
    window, share = draw.choice((2, 5, 16, 40, 100)), draw.choice((0.5, 0.5, 1.0))
    window *= draw.choice((1, -1))
    return tuple(window if layer == num_layers - 1 or draw.random() < share else 0 for layer in range(num_layers))


def with_room_for_windows(scenario: Scenario, largest: int) -> Scenario:
    """Return the scenario with as many blocks for the largest request, more or less, as if all layers kept
    everything."""
    groups, size = group_layers(scenario.windows), scenario.decode_block_size

    def blocks(given: int, step_tokens: int) -> int:
        needed = groups.blocks_of(largest, size, step_tokens)
        return math.ceil(given * needed / -(-largest // size))

    return replace(
        scenario,
        prefill_blocks=blocks(scenario.prefill_blocks, scenario.prefill.max_step_tokens),
        decode_blocks=blocks(scenario.decode_blocks, scenario.decode.max_step_tokens),
        swap_blocks=blocks(scenario.swap_blocks, scenario.decode.max_step_tokens),
    )
