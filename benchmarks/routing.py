"""`twostroke bench routing`: how long a router takes to choose a path, by the number of workers and of indexed blocks.

The router's own PathChooser is asked, as for a request; the workers exist only as the numbers and block names that they
would tell. Prompts begin with one of a few system prompts that many workers hold, go on with a conversation that one
worker of each role holds, and end with something new. Hashing a prompt is timed apart: it is done once a request. With
--tiers each worker has a KV tier, and the tier of another worker of each role holds the conversation.

Times are the thread's own, which stand still while neighbours have the core: nothing here waits.
"""

import argparse
import asyncio
import json
import random
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass

from twostroke.benchmarks.console import positive
from twostroke.protocol.block_hash import chain_hashes, pack_names, short_name
from twostroke.protocol.kv_layout import KVLayout
from twostroke.protocol.messages import BlocksHeld
from twostroke.protocol.requests import Address, GenerateRequest, Peer, SamplingParams
from twostroke.protocol.stats import QueuedWork, StepCosts, TierStats, WorkerInfo, WorkerStats
from twostroke.router.routing.block_index import BlockIndex, PromptNames
from twostroke.router.routing.chooser import PathChooser, PathConfig
from twostroke.router.routing.workers import FleetView, Hold

WORKERS = (4, 16, 64, 256, 1000)
BLOCKS = (10_000, 100_000, 1_000_000)
BLOCK_SIZE = 16
VOCAB = 100_000
NUM_SYSTEM_PROMPTS = 4
LAYOUT = KVLayout("bench", "bfloat16", 32, 8, 128, BLOCK_SIZE)
NEVER_S = 1e9


@dataclass(frozen=True)
class Times:
    """Medians, in seconds."""

    decide_s: float  # from the request to the places held, its prompt hashed already
    find_s: float  # of that, asking the index
    hash_s: float  # naming the blocks of a prompt


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The bench's options."""
    parser.add_argument("--workers", nargs="+", type=positive, default=list(WORKERS), help="half of them prefill")
    parser.add_argument("--blocks", nargs="+", type=positive, default=list(BLOCKS), help="in all workers' caches")
    parser.add_argument("--prompt-tokens", type=positive, default=4096)
    parser.add_argument("--tiers", action="store_true", help="workers have KV tiers")
    parser.add_argument("--requests", type=positive, default=300, help="of each case; medians are reported")


def run(args: argparse.Namespace) -> int:
    """Measure and print; the last line of stdout is one JSON object."""
    most_blocks = max(args.blocks)
    cases = [(workers, most_blocks) for workers in args.workers]
    cases += [(64, blocks) for blocks in args.blocks if blocks != most_blocks]
    measured: dict[tuple[int, int], Times] = {}
    print(f"prompts of {args.prompt_tokens} tokens, three quarters of them cached somewhere; medians in microseconds")
    print(f"{'workers':>8}{'blocks':>10}{'decide':>10}{'find':>8}{'hash':>8}")
    for workers, blocks in cases:
        times = asyncio.run(measure(workers, blocks, args.prompt_tokens, args.requests, tiers=args.tiers))
        measured[workers, blocks] = times
        numbers = f"{times.decide_s * 1e6:>10.0f}{times.find_s * 1e6:>8.0f}{times.hash_s * 1e6:>8.0f}"
        print(f"{workers:>8}{blocks:>10}{numbers}", flush=True)
    report: dict[str, object] = {
        f"decide_{workers}_s": round(measured[workers, most_blocks].decide_s, 7) for workers in args.workers
    }
    largest = measured[max(args.workers), most_blocks]
    report |= {"hash_s": round(largest.hash_s, 7), "find_s": round(largest.find_s, 7), "blocks": most_blocks}
    report["decide_64_s_by_blocks"] = {
        blocks: round(times.decide_s, 7) for (number, blocks), times in measured.items() if number == 64
    }
    print(json.dumps(report))
    return 0


async def measure(
    num_workers: int, num_blocks: int, prompt_tokens: int, num_requests: int, *, tiers: bool = False
) -> Times:
    """Time `num_requests` decisions, each for another prompt, with the numbers of some workers renewed between them."""
    draw = random.Random(0)
    infos = [_info(number) for number in range(num_workers)]
    config = PathConfig()
    view = FleetView(time.monotonic)
    names = PromptNames()
    blocks, tier_blocks = (
        BlockIndex(clock=time.monotonic, max_blocks=config.index_blocks, expected_s=config.expected_s, names=names)
        for _ in range(2)
    )
    chooser = PathChooser(
        workers=lambda: infos,
        follow=lambda workers: None,
        view=view,
        blocks=blocks,
        tier_blocks=tier_blocks,
        clock=time.monotonic,
        config=config,
    )
    prompts = _prompts(draw, prompt_tokens, num_requests)
    requests = [_request(number, prompt) for number, prompt in enumerate(prompts)]
    for info in infos:
        view.on_stats(info.peer, _stats(draw, tiers=tiers))
    cached = _caches(draw, infos, prompts, num_blocks)
    for peer, held in cached.items():
        blocks.heard(peer, _held(held))
    if tiers:
        for peer, held in _caches(random.Random(1), infos, prompts, num_blocks).items():
            tier_blocks.heard(peer, _held(held))

    decide_s: list[float] = []
    hash_s: list[float] = []
    hold: Hold | None = None
    for request in requests:
        begin = time.thread_time()
        PromptNames().of(request.token_ids, request.cache_salt, BLOCK_SIZE)
        hash_s.append(time.thread_time() - begin)
        chooser.choose(request)  # hashes the prompt
        for info in draw.sample(infos, max(1, num_workers // 100)):
            view.on_stats(info.peer, _stats(draw, tiers=tiers))
        if hold is not None:
            hold.release()  # now, so that this decision has to take in what has changed at two workers
        begin = time.thread_time()
        hold = chooser.hold(chooser.choose(request), request, ())
        decide_s.append(time.thread_time() - begin)
    find_s = _time_index(cached, prompts)
    return Times(statistics.median(decide_s), find_s, statistics.median(hash_s))


def _time_index(cached: dict[Peer, list[int]], prompts: Sequence[tuple[int, ...]]) -> float:
    index = BlockIndex(clock=time.monotonic, max_blocks=PathConfig().index_blocks, expected_s=NEVER_S)
    for peer, names in cached.items():
        index.heard(peer, _held(names))
    times: list[float] = []
    for prompt in prompts:
        names = [short_name(one) for one in chain_hashes(prompt, BLOCK_SIZE, b"")]
        begin = time.thread_time()
        index.find(names)
        times.append(time.thread_time() - begin)
    return statistics.median(times)


def _prompts(draw: random.Random, num_tokens: int, count: int) -> list[tuple[int, ...]]:
    """A quarter of each is a system prompt, half a conversation of its own, the rest new."""
    systems = [_tokens(draw, num_tokens // 4) for _ in range(NUM_SYSTEM_PROMPTS)]
    return [(*draw.choice(systems), *_tokens(draw, num_tokens - num_tokens // 4)) for _ in range(count)]


def _caches(
    draw: random.Random, infos: Sequence[WorkerInfo], prompts: Sequence[tuple[int, ...]], num_blocks: int
) -> dict[Peer, list[int]]:
    """Return the names of blocks that each worker holds: prompts' beginnings, and others up to `num_blocks` in all."""
    held: dict[Peer, set[int]] = {info.peer: set() for info in infos}
    roles = [[info.peer for info in infos if info.role == role] for role in ("prefill", "decode")]
    for prompt in prompts:
        names = [short_name(one) for one in chain_hashes(prompt, BLOCK_SIZE, b"")]
        for peers in roles:
            for peer in draw.sample(peers, max(1, len(peers) // 2)):
                held[peer].update(names[: len(names) // 4])
            held[draw.choice(peers)].update(names[: 3 * len(names) // 4])
    missing = num_blocks - len(set().union(*held.values()))
    for number in range(max(0, missing)):
        held[infos[number % len(infos)].peer].add(draw.getrandbits(64))
    return {peer: list(names) for peer, names in held.items()}


def _tokens(draw: random.Random, count: int) -> tuple[int, ...]:
    return tuple(draw.randrange(VOCAB) for _ in range(count))


def _request(number: int, prompt: tuple[int, ...]) -> GenerateRequest:
    return GenerateRequest(f"request-{number}", "router", prompt, len(prompt), SamplingParams(), 256)


def _info(number: int) -> WorkerInfo:
    return WorkerInfo(
        role="decode" if number % 2 else "prefill",
        peer=Peer(f"worker-{number:04}", number),
        token_address=Address("127.0.0.1", 1),
        transfer_addresses=(Address("127.0.0.1", 2),),
        layout=LAYOUT,
        num_blocks=30_000,
        max_context=131_072,
    )


def _stats(draw: random.Random, *, tiers: bool) -> WorkerStats:
    """A worker at work, of two SLO classes."""
    running, waiting = draw.randrange(32), draw.randrange(4)
    slow = draw.uniform(0.9, 1.1)
    return WorkerStats(
        num_waiting=waiting,
        num_running=running,
        num_waiting_tokens=waiting * 2000,
        free_blocks=draw.randrange(5_000, 25_000),
        total_blocks=30_000,
        queued=(
            QueuedWork("interactive", 10, 0.0, waiting * 500, waiting),
            QueuedWork("batch", 0, 0.1, waiting * 1500, waiting),
        ),
        context_tokens=running * 2000,
        tightest_tpot_s=0.05,
        tiers=(TierStats("disk", num_bytes=1 << 40, read_s=0.002, read_token_s=6e-6),) if tiers else (),
        costs=StepCosts(0.008 * slow, 6e-5 * slow, 2e-9 * slow, 5e-5 * slow, 4e-8 * slow, 1000),
    )


def _held(names: Sequence[int]) -> BlocksHeld:
    return BlocksHeld(pack_names(names), is_first=True, is_last=True, sequence=0)
