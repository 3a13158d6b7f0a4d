"""What a seed means: workers, pools, requests, cancels and faults. Pure; the same seed gives the same scenario."""

import random
from dataclasses import dataclass

from tests.simulation.arrivals import Arrival, asked_again, make_arrivals, poisoned
from tests.simulation.fault_plan import DECODE_FAULTS, Fault, make_faults
from twostroke.decode_worker.config import DecodeConfig
from twostroke.prefill_worker.config import PrefillConfig
from twostroke.router.generate.config import PipelineConfig
from twostroke.worker.token_server import TokenServerConfig

MAX_CONTEXT = 240
ROUTER_LEASE_S = 4.0
POISON_SHARE = 0.1


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
    is_overload: bool  # more requests than queues hold: some are refused
    max_context: int = MAX_CONTEXT
    blind_pulls: float = 0.0  # share of the prompts that decode workers read alone which are pulled from anybody


def make_scenario(seed: int, *, with_faults: bool = False) -> Scenario:
    """The scenario of `seed`."""
    draw = random.Random(f"{seed}/{with_faults}")
    prefill_block_size = decode_block_size = draw.choice((1, 2, 3, 4, 8, 16))
    if draw.random() < 0.3:
        prefill_block_size = draw.choice((1, 2, 3, 4, 8, 16))
    num_prefill = draw.choice((0, 0, 1, 1, 1, 2, 2))
    max_batch = draw.choice((1, 2, 3, 8))
    num_layers = draw.choice((1, 2, 3))
    swap_share = draw.choice((0.0, 0.5, 2.0, 2.0))
    is_crowded = draw.random() < 0.2  # many short prompts with long answers: blocks run out while all decode
    if is_crowded:
        max_batch = 8
    num_routers = draw.choice((1, 1, 2))
    is_overload = with_faults and draw.random() < 0.1
    is_poisonous = with_faults and not is_overload and draw.random() < POISON_SHARE
    if is_poisonous:
        num_routers = draw.choice((1, 2, 2))
    arrivals = make_arrivals(draw, num_routers, num_layers, is_crowded=is_crowded, is_overload=is_overload)
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
    return Scenario(
        seed=seed,
        num_layers=num_layers,
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
            token_channel=TokenServerConfig(lease_s=ROUTER_LEASE_S),
        ),
        pipeline=PipelineConfig(
            pulls=draw.random() < 0.8,
            pull_min_tokens=draw.choice((1, 32)),
            # Else what comes again goes where its KV is, and has nothing to pull.
            policy="round_robin" if is_asked_again and draw.random() < 0.5 else "kv_aware",
        ),
        max_chunk_bytes=draw.choice((1, 64, 1024, 65536)),
        link_bytes_per_s=draw.choice((5e3, 5e4, 5e6) if is_asked_again else (5e4, 5e5, 5e6)),
        arrivals=arrivals,
        faults=faults,
        is_overload=is_overload,
        blind_pulls=blind_pulls,
    )
