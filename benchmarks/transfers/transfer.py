"""`twostroke bench transfer`: what a request feels of its KV's transfer.

Two parts with two real workers each, in processes of their own, the router's pipeline before them, no Ray:

    hand-over  from the end of a prompt's prefill to its first decode step, with several requests at a time
    exposed    the same of one prompt alone, as a share of the prefill's time, on a link on which the whole KV takes
               half as long as the prefill

And one of two processes without workers, which can be on one GPU (pull.py):

    pull       bytes a second beside a plain copy, and the hand-over alone and while the target computes

Moments are the engines' own: the end of the step that drew the first token, and when the first decode step is given to
the engine, which is up to one step before it computes where steps are scheduled ahead.
What lies between is everything that disaggregation adds to a request: the last layers' bytes, digests, commit, the
decode worker's wake-up, and the wait for its step under way. All processes of a machine share CLOCK_MONOTONIC.
"""

import argparse
import asyncio
import json
import random
import statistics
import tempfile
from collections.abc import Callable, Collection, Coroutine, Mapping
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from twostroke.benchmarks.console import positive, say
from twostroke.benchmarks.random_model import write_random_model
from twostroke.benchmarks.transfers.pull import DRY, SIZES, Device, measure_pulls
from twostroke.benchmarks.transfers.worker_process import ProcessFleet, Settings, serve_workers
from twostroke.cluster.config.model_folder import resolve_model_folder
from twostroke.kvtransfer.config import TransportName
from twostroke.loadtests.report.estimates import percentile
from twostroke.model.checkpoint.config_file import load_model_config
from twostroke.model.costs.sizes import kv_block_bytes
from twostroke.protocol.errors import ConfigError, TransferFailed

EXPOSED_TOKENS = {"exposed_1k": 1024, "exposed_8k": 8192}
HANDOVER_TOKENS, HANDOVER_ANSWER_TOKENS = 256, 32
BLOCK_SIZE = 16
FIRST_TOKEN_ID = 300
QUICK_ROUNDS, QUICK_REQUESTS = 1, 100


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=None, help="what to measure (default: all)")
    parser.add_argument(
        "--device", choices=("cpu", "cuda"), default="cpu", help="of both processes; cuda: without the part exposed"
    )
    parser.add_argument("--dry-run", action="store_true", help="the part pull alone, tiny and on the CPU")
    parser.add_argument("--quick", action="store_true", help="few rounds, in about a minute and a half")
    parser.add_argument("--rounds", type=positive, help="prompts a figure; medians count (default: 5; quick: 1)")
    parser.add_argument("--requests", type=positive, help="of hand-overs (default: 400; quick: 100)")
    parser.add_argument(
        "--concurrency", type=positive, default=8, help="requests at a time there (default: %(default)s)"
    )
    parser.add_argument("--transport", default="auto", help="kv_transfer.transport there (default: %(default)s)")


def run(arguments: argparse.Namespace) -> int:
    """Measure and print; the last line of stdout is one JSON object. A part that fails is named there, with its reason,
    and the others are measured all the same; then the exit code is 1."""
    figures: dict[str, float] = {}
    failed: dict[str, str] = {}
    arguments.rounds = arguments.rounds or (QUICK_ROUNDS if arguments.quick else 5)
    arguments.requests = arguments.requests or (QUICK_REQUESTS if arguments.quick else 400)
    possible = [part for part in PARTS if part in _possible_parts(arguments)]
    if unfit := sorted({*(arguments.parts or ())} - {*possible}):
        raise ConfigError(f"--parts: {', '.join(unfit)} is none of {', '.join(possible)}, which can be had there")
    if arguments.device == "cuda" and not (arguments.dry_run or torch.cuda.is_available()):
        raise ConfigError("--device cuda needs a CUDA device, and torch finds none here; --dry-run needs none")
    for part in arguments.parts or possible:
        try:
            asyncio.run(PARTS[part](arguments, figures))
        except Exception as error:  # whatever it is, minutes of other measurements are not lost for it
            failed[part] = f"{type(error).__name__}: {error}"
            say(f"{part} failed: {failed[part]}")
    print(json.dumps(figures | ({"failed": failed} if failed else {})))
    return 1 if failed else 0


def _possible_parts(arguments: argparse.Namespace) -> Collection[str]:
    """Return the parts that can be measured there: a GPU's KV goes over no TCP link whose rate could be set."""
    if arguments.dry_run:
        return ("pull",)
    return PARTS.keys() - ({"exposed"} if arguments.device == "cuda" else set())


async def _measure_exposed(arguments: argparse.Namespace, figures: dict[str, float]) -> None:
    """One prompt of each length over a free link first, then all over one that is throttled by how long that took."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        say("writing a random model of 12 layers x 768")
        write_random_model(folder, max_position=2 * max(EXPOSED_TOKENS.values()))
        block_bytes = kv_block_bytes(load_model_config(folder), BLOCK_SIZE, 2)
        async with _served(folder, max(EXPOSED_TOKENS.values()), 1, "tcp", None) as served:
            free = {tokens: await _send(served, folder, 1, 1, tokens, 2) for tokens in EXPOSED_TOKENS.values()}
        for figure, tokens in EXPOSED_TOKENS.items():
            rate = int(-(-tokens // BLOCK_SIZE) * block_bytes / (free[tokens][0].prefill_s / 2))
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
    async with _served(folder, HANDOVER_TOKENS, at_once, arguments.transport, None, arguments.device) as served:
        handovers = await _send(served, folder, arguments.requests, at_once, HANDOVER_TOKENS, HANDOVER_ANSWER_TOKENS)
    seconds = [one.handover_s for one in handovers]
    figures |= {f"handover_p{percent}_s": percentile(seconds, percent) or 0.0 for percent in (50, 99)}
    say(
        f"hand-over, {at_once} requests at a time: P50 {figures['handover_p50_s'] * 1e3:.1f} ms, "
        f"P99 {figures['handover_p99_s'] * 1e3:.1f} ms, the wait for the decode step under way included"
    )


async def _measure_pulls(arguments: argparse.Namespace, figures: dict[str, float]) -> None:
    device: Device = "cpu" if arguments.dry_run else arguments.device
    sizes = DRY if arguments.dry_run else replace(SIZES[device], handovers=arguments.requests)
    figures |= await measure_pulls(device, sizes)


PARTS: Mapping[str, Callable[[argparse.Namespace, dict[str, float]], Coroutine[Any, Any, None]]] = {
    "pull": _measure_pulls,
    "handover": _measure_handover,
    "exposed": _measure_exposed,
}


@dataclass(frozen=True)
class Handover:
    """One request's, in seconds."""

    prefill_s: float
    handover_s: float


def _served(
    folder: Path,
    prompt_tokens: int,
    concurrency: int,
    transport: TransportName,
    max_bytes_per_s: int | None,
    device: Device = "cpu",
) -> AbstractAsyncContextManager[ProcessFleet]:
    prefill = Settings(
        role="prefill",
        model=str(folder),
        num_blocks=2 * (concurrency + 1) * (-(-prompt_tokens // BLOCK_SIZE) + 8),
        block_size=BLOCK_SIZE,
        transport=transport,
        device=device,
        tcp_max_bytes_per_s=max_bytes_per_s,
    )
    return serve_workers(prefill, replace(prefill, role="decode"))


async def _send(
    served: ProcessFleet, folder: Path, requests: int, concurrency: int, prompt_tokens: int, max_tokens: int
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
                async for _ in served.generate(prompt, max_tokens):
                    pass

        await asyncio.gather(*(client() for _ in range(concurrency)))

    warm_up = 2 * concurrency if concurrency > 1 else 1
    await send(range(warm_up), min(prompt_tokens, 1024))
    await served.notes()
    await send(range(warm_up, warm_up + requests), prompt_tokens)
    source, target = await served.notes()
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
