"""What a seed means: workers, pools, requests, cancels and faults. Pure; the same seed gives the same scenario."""

import random
from dataclasses import dataclass, replace

from msgspec import structs

from decode_worker.config import DecodeConfig
from prefill_worker.config import PrefillConfig
from protocol.requests import GenerateRequest, SamplingParams
from router.config import PipelineConfig
from tests.simulation.fake_model import VOCAB, expected_tokens

MAX_PROMPT = 200
MAX_CONTEXT = 240

FAULTS = (
    "cut_transfers",  # control connections and data links between a prefill and a decode worker break
    "cut_links",  # the data links alone break, perhaps in the middle of a chunk
    "part_transfers",  # the two can't reach each other for some time
    "block_transfers",  # the same from the beginning, so that no offer is ever seen
    "damage",  # a byte of the next chunks changes under way
    "refuse_prefill",  # the next prefill calls fail before they begin
    "lose_prefill_reply",  # the next prefill calls fail after they have run
    "kill_prefill",  # a prefill worker crashes; another starts later
    "kill_decode",  # a decode worker crashes; another starts later
    "fail_engine",  # an engine raises; the worker is replaced
    "cut_channel",  # a router loses its token channel to a worker
)

DECODE_FAULTS = ("kill_decode", "fail_engine", "cut_channel")
"""At most one of these in a run, which then has two decode workers: with none left, requests fail, and rightly so."""


@dataclass(frozen=True)
class Arrival:
    """A request, and what its client does. Times in virtual seconds."""

    at_s: float
    router: int
    request: GenerateRequest
    cancel_after_s: float | None  # the client leaves so long after it came, unless it has its answer by then


@dataclass(frozen=True)
class Fault:
    """Something that goes wrong. `which` picks the workers."""

    at_s: float
    kind: str
    which: int


@dataclass(frozen=True)
class Scenario:
    """One simulated run."""

    seed: int
    num_layers: int
    prefill_block_size: int
    decode_block_size: int
    transports: tuple[str, ...]
    num_routers: int
    num_prefill: int  # 0: aggregated
    num_decode: int
    prefill_blocks: int
    decode_blocks: int
    swap_blocks: int  # of a decode worker; 0: none
    prefill: PrefillConfig
    decode: DecodeConfig
    pipeline: PipelineConfig
    max_chunk_bytes: int
    link_bytes_per_s: float
    arrivals: tuple[Arrival, ...]
    faults: tuple[Fault, ...]


def make_scenario(seed: int, *, with_faults: bool = False) -> Scenario:
    """The scenario of `seed`."""
    draw = random.Random(f"{seed}/{with_faults}")
    prefill_block_size = decode_block_size = draw.choice((1, 2, 3, 4, 8, 16))
    if draw.random() < 0.3:
        prefill_block_size = draw.choice((1, 2, 3, 4, 8, 16))
    num_prefill = draw.choice((0, 1, 1, 1, 2, 2))
    max_batch = draw.choice((1, 2, 3, 8))
    num_layers = draw.choice((1, 2, 3))
    swap_share = draw.choice((0.0, 0.5, 2.0, 2.0))
    is_crowded = draw.random() < 0.2  # many short prompts with long answers: blocks run out while all decode
    if is_crowded:
        max_batch = 8
    arrivals = _make_arrivals(draw, num_routers := draw.choice((1, 1, 2)), num_layers, is_crowded=is_crowded)
    faults = _make_faults(draw, num_prefill) if with_faults else ()
    largest = max(len(one.request.token_ids) + one.request.max_tokens for one in arrivals)
    prefill_needed, decode_needed = -(-largest // prefill_block_size), -(-largest // decode_block_size)
    return Scenario(
        seed=seed,
        num_layers=num_layers,
        prefill_block_size=prefill_block_size,
        decode_block_size=decode_block_size,
        transports=draw.choice((("memory",), ("memory_pull", "memory"), ("memory_pull",))),
        num_routers=num_routers,
        num_prefill=num_prefill,
        num_decode=2 if any(fault.kind in DECODE_FAULTS for fault in faults) else draw.choice((1, 1, 2)),
        prefill_blocks=int(prefill_needed * draw.choice((1.0, 1.3, 2.0, 4.0))),
        decode_blocks=int(decode_needed * draw.choice((1.0, 1.2) if is_crowded else (1.0, 1.1, 1.5, 2.0, 4.0))),
        swap_blocks=int(decode_needed * swap_share),
        prefill=PrefillConfig(
            max_step_tokens=draw.choice((5, 16, 33, 64, 256)),
            max_batch=draw.choice((1, 2, 8)),
            min_pull_tokens=draw.choice((1, 64)),
            integrity_interval_s=0.0,
        ),
        decode=DecodeConfig(
            max_step_tokens=max_batch + draw.choice((0, 1, 15, 60)),
            max_batch=max_batch,
            watermark=draw.choice((0.0, 0.05, 0.2)),
            preemption=draw.choice(("auto", "swap", "swap", "auto")) if swap_share else "auto",
            swap_gib=swap_share,
            run_ahead=draw.random() < 0.8,
            offer_wait_s=4.0 if seed % 2 else 10_000.0,  # the latter ends no wait: somebody must tell
            integrity_interval_s=0.0,
        ),
        pipeline=PipelineConfig(pulls=draw.random() < 0.8, pull_min_tokens=draw.choice((1, 32))),
        max_chunk_bytes=draw.choice((1, 64, 1024, 65536)),
        link_bytes_per_s=draw.choice((5e4, 5e5, 5e6)),
        arrivals=arrivals,
        faults=faults,
    )


def _make_arrivals(draw: random.Random, num_routers: int, num_layers: int, *, is_crowded: bool) -> tuple[Arrival, ...]:
    stems = [_tokens(draw, draw.randint(1, 120)) for _ in range(2)]
    spread_s = draw.choice((0.0, 0.02, 0.2))
    arrivals: list[Arrival] = []
    for _ in range(draw.randint(2, 6)):
        prompt = (draw.choice(stems) if draw.random() < 0.6 else ()) + _tokens(draw, draw.choice((1, 5, 20, 80)))
        prompt = prompt[: draw.choice((8, 16) if is_crowded else (MAX_PROMPT, MAX_PROMPT, 48, 16))]
        at_s = draw.random() * spread_s
        max_tokens = 40 if is_crowded else draw.choice((1, 2, 5, 12, 40))
        stop = tuple(draw.sample(range(VOCAB), draw.choice((0, 1) if is_crowded else (0, 1, 4))))
        for _ in range(draw.choice((1, 1, 1, 2, 3))):  # choices of one prompt
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
                    ),
                    cancel_after_s=draw.choice((0.002, 0.02, 0.1)) * draw.random() if draw.random() < 0.3 else None,
                )
            )
    for first in arrivals[:2] if draw.random() < 0.5 else ():
        arrivals.append(_next_turn(draw, first, num_layers, f"template-{len(arrivals)}"))
    return tuple(arrivals)


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


def _make_faults(draw: random.Random, num_prefill: int) -> tuple[Fault, ...]:
    kinds: tuple[str, ...] = FAULTS if num_prefill else DECODE_FAULTS
    faults: list[Fault] = []
    for _ in range(draw.choice((1, 1, 2))):
        if any(fault.kind in DECODE_FAULTS for fault in faults):
            kinds = tuple(kind for kind in kinds if kind not in DECODE_FAULTS)
        if not kinds:
            break
        at_s, kind = draw.random() * draw.choice((0.01, 0.1)), draw.choice(kinds)
        faults.append(Fault(0.0 if kind == "block_transfers" else at_s, kind, which=draw.randrange(1000)))
    return tuple(sorted(faults, key=lambda fault: fault.at_s))


def _tokens(draw: random.Random, length: int) -> tuple[int, ...]:
    return tuple(draw.randrange(VOCAB) for _ in range(length))
