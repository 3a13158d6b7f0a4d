"""`twostroke bench transfer`: what a request feels of its KV's transfer, and links against the limits of this machine.

Three parts, all between processes of this machine:

    hand-over  from the end of a prompt's prefill to its first decode step, with several requests at a time
    exposed    the same of one prompt alone, as a share of the prefill's time, on a link on which the whole KV takes
               half as long as the prefill
    links      tcp against a bare sendmsg/recvmsg_into loop, shm against memcpy

For the first two there are two real workers in processes of their own, the router's pipeline before them, no Ray.
Moments are the engines' own: the end of the step that drew the first token, the beginning of the first decode step.
What lies between is everything that disaggregation adds to a request: the last layers' bytes, digests, commit, the
decode worker's wake-up, and the wait for its step under way.
"""

import argparse
import asyncio
import dataclasses
import itertools
import json
import random
import statistics
import tempfile
from collections.abc import Callable, Coroutine, Mapping
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import torch

from twostroke.benchmarks.console import positive, say
from twostroke.benchmarks.engine import write_random_model
from twostroke.benchmarks.links import SHAPES, Case, Ratios, measure_case, peer_process
from twostroke.benchmarks.worker_process import Served, Settings, serve_workers
from twostroke.cluster.config.model_folder import resolve_model_folder
from twostroke.cluster.config.sections import TransportChoice
from twostroke.loadtests.report.estimates import percentile
from twostroke.model.cache.kv_cache import kv_block_bytes
from twostroke.model.checkpoint.config_file import load_model_config
from twostroke.protocol.errors import TransferFailed

PROMPT_TOKENS = (128, 1024, 8192, 32768)  # of the links' cases
BLOCK_SIZES = (16, 32, 64)
EXPOSED_TOKENS = {"exposed_1k": 1024, "exposed_8k": 8192}
HANDOVER_TOKENS, HANDOVER_ANSWER_TOKENS = 256, 32
BLOCK_SIZE = 16
SECRET = "a secret of this bench alone"
FIRST_TOKEN_ID = 300
QUICK_ROUNDS, QUICK_REQUESTS = 2, 100


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=None, help="what to measure (default: all)")
    parser.add_argument(
        "--quick", action="store_true", help="hand-over and exposed with few rounds, in a minute and a half"
    )
    parser.add_argument(
        "--shapes", nargs="+", choices=tuple(SHAPES), default=tuple(SHAPES), help="models of the links part"
    )
    parser.add_argument("--rounds", type=positive, help="turns a figure; medians count (default: 5; quick: 2)")
    parser.add_argument("--requests", type=positive, help="of the hand-over part (default: 400; quick: 100)")
    parser.add_argument(
        "--concurrency", type=positive, default=8, help="requests at a time there (default: %(default)s)"
    )
    parser.add_argument("--transport", default="auto", help="kv_transfer.transport there (default: %(default)s)")


def run(arguments: argparse.Namespace) -> int:
    """Measure and print; the last line of stdout is one JSON object. A part that fails is named there, with its reason,
    and the others are measured all the same; then the exit code is 1."""
    figures: dict[str, float] = {}
    failed: dict[str, str] = {}
    if arguments.quick:
        arguments.parts = arguments.parts or ("handover", "exposed")
    arguments.rounds = arguments.rounds or (QUICK_ROUNDS if arguments.quick else 5)
    arguments.requests = arguments.requests or (QUICK_REQUESTS if arguments.quick else 400)
    for part in arguments.parts or PARTS:
        try:
            asyncio.run(PARTS[part](arguments, figures))
        except Exception as error:  # whatever it is, minutes of other measurements are not lost for it
            failed[part] = f"{type(error).__name__}: {error}"
            say(f"{part} failed: {failed[part]}")
    print(json.dumps(figures | ({"failed": failed} if failed else {})))
    return 1 if failed else 0


async def _measure_links(arguments: argparse.Namespace, figures: dict[str, float]) -> None:
    cases = [Case(*cell) for cell in itertools.product(arguments.shapes, PROMPT_TOKENS, BLOCK_SIZES)]
    results: list[Ratios] = []
    async with peer_process() as peer:
        for number, case in enumerate(cases, 1):
            ratios = await measure_case(peer, case, arguments.rounds)
            results.append(ratios)
            say(
                f"links {number}/{len(cases)}  {case!s:>34}  "
                f"tcp {ratios.tcp_over_bare:.2f} of bare ({ratios.tcp_bytes_per_s / 1e9:.1f} GB/s), "
                f"shm {ratios.shm_over_memcpy:.2f} of memcpy ({ratios.shm_bytes_per_s / 1e9:.1f})"
            )
    for field in dataclasses.fields(Ratios):
        figures[field.name] = statistics.median(getattr(one, field.name) for one in results)


async def _measure_exposed(arguments: argparse.Namespace, figures: dict[str, float]) -> None:
    """Prefill times over a free link first, then over one that is throttled accordingly."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        say("writing a random model of 12 layers x 768")
        write_random_model(folder, max_position=2 * max(EXPOSED_TOKENS.values()))
        async with _served(folder, max(EXPOSED_TOKENS.values()), 1, "tcp", None) as served:
            free = {
                tokens: await _send(served, folder, arguments.rounds, 1, tokens, 2)
                for tokens in EXPOSED_TOKENS.values()
            }
        for figure, tokens in EXPOSED_TOKENS.items():
            prefill_s = statistics.median(one.prefill_s for one in free[tokens])
            block_bytes = kv_block_bytes(load_model_config(folder), BLOCK_SIZE, torch.bfloat16)
            rate = int(-(-tokens // BLOCK_SIZE) * block_bytes / (prefill_s / 2))
            async with _served(folder, tokens, 1, "tcp", rate) as served:
                paced = await _send(served, folder, arguments.rounds, 1, tokens, 2)
            prefill_s = statistics.median(one.prefill_s for one in paced)
            handover_s = statistics.median(one.handover_s for one in paced)
            figures[figure] = handover_s / prefill_s
            say(
                f"exposed at {tokens} tokens: {handover_s * 1e3:.1f} ms of {prefill_s * 1e3:.0f} ms, "
                f"{figures[figure]:.1%}, on a link of {rate / 1e6:.0f} MB/s"
            )


async def _measure_handover(arguments: argparse.Namespace, figures: dict[str, float]) -> None:
    """Over a free link, with the bundled model."""
    folder, at_once = resolve_model_folder("bundled"), arguments.concurrency
    async with _served(folder, HANDOVER_TOKENS, at_once, arguments.transport, None) as served:
        handovers = await _send(served, folder, arguments.requests, at_once, HANDOVER_TOKENS, HANDOVER_ANSWER_TOKENS)
    seconds = [one.handover_s for one in handovers]
    figures |= {f"handover_p{percent}_s": percentile(seconds, percent) or 0.0 for percent in (50, 99)}
    say(
        f"hand-over, {at_once} requests at a time: P50 {figures['handover_p50_s'] * 1e3:.1f} ms, "
        f"P99 {figures['handover_p99_s'] * 1e3:.1f} ms, the wait for the decode step under way included"
    )


PARTS: Mapping[str, Callable[[argparse.Namespace, dict[str, float]], Coroutine[Any, Any, None]]] = {
    "handover": _measure_handover,
    "exposed": _measure_exposed,
    "links": _measure_links,
}


@dataclass(frozen=True)
class Handover:
    """One request's, in seconds."""

    prefill_s: float
    handover_s: float


def _served(
    folder: Path, prompt_tokens: int, concurrency: int, transport: TransportChoice, max_bytes_per_s: int | None
) -> AbstractAsyncContextManager[Served]:
    prefill = Settings(
        role="prefill",
        model=str(folder),
        dtype="bfloat16",
        num_blocks=2 * (concurrency + 1) * (-(-prompt_tokens // BLOCK_SIZE) + 8),
        block_size=BLOCK_SIZE,
        transport=transport,
        secret=SECRET,
        tcp_max_bytes_per_s=max_bytes_per_s,
    )
    return serve_workers(prefill, msgspec.structs.replace(prefill, role="decode"))


async def _send(
    served: Served, folder: Path, requests: int, concurrency: int, prompt_tokens: int, max_tokens: int
) -> list[Handover]:
    """Hand-overs of `requests` requests, `concurrency` at a time, after some that warm everything up.

    Prompts share no prefix: each begins with a token that no other begins with, which names it. A prompt that the
    decode worker computed itself has none. Raises TransferFailed where a transfer
    failed, or all prompts were computed so: then there is nothing to speak of.
    """
    vocab_size = load_model_config(folder).vocab_size
    draw = random.Random(0)
    firsts = range(FIRST_TOKEN_ID, vocab_size)

    async def send(names: range, num_tokens: int) -> None:
        left = iter(names)

        async def client() -> None:
            for name in left:
                prompt = [firsts[name % len(firsts)], *(draw.choice(firsts) for _ in range(num_tokens - 1))]
                await served.generate(prompt, max_tokens)

        await asyncio.gather(*(client() for _ in range(concurrency)))

    warm_up = 2 * concurrency if concurrency > 1 else 1
    await send(range(warm_up), min(prompt_tokens, 1024))
    await asyncio.gather(served.prefill.notes(), served.decode.notes())
    await send(range(warm_up, warm_up + requests), prompt_tokens)
    source, target = await asyncio.gather(served.prefill.notes(), served.decode.notes())
    if source.stats.transfers_failed or target.stats.transfers_failed:
        raise TransferFailed(f"{target.stats.transfers_failed} transfers failed")
    handovers = [
        Handover(read.first_token_drawn - read.first_step_began, written.first_step_began - read.first_token_drawn)
        for name, read in source.moments.items()
        if (written := target.moments.get(name)) is not None
    ]
    if not handovers:
        raise TransferFailed("the decode worker computed all prompts itself: no KV was handed over")
    if len(handovers) < requests:
        say(f"{requests - len(handovers)} of {requests} prompts were computed by the decode worker itself")
    return handovers
