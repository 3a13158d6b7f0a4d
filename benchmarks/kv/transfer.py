"""`twostroke bench transfer`: KV transfer against the limits of this machine, and what a request feels of it.

Three parts, all between processes of this machine:

    links      tcp against a bare sendmsg/recvmsg_into loop, shm against memcpy, gloo against a bare gloo send
    exposed    from the end of a prompt's prefill to its first decode step, as a share of the prefill's time, on a link
               on which the whole KV takes half as long as the prefill
    hand-over  the same on a free link, with several requests at a time
"""

import argparse
import asyncio
import dataclasses
import json
import statistics
import sys
import tempfile
from collections.abc import Sequence
from itertools import product
from pathlib import Path

from twostroke.benchmarks.arguments import positive
from twostroke.benchmarks.engine import write_random_model
from twostroke.benchmarks.kv.handover import Exposed, Handover, measure_exposed, measure_handovers
from twostroke.benchmarks.kv.limits import SHAPES, Case
from twostroke.benchmarks.kv.links import Ratios, measure_case, peer_process
from twostroke.cluster.config.model_folder import resolve_model_folder
from twostroke.loadtests.report.estimates import percentile

PROMPT_TOKENS = (128, 1024, 8192, 32768)
BLOCK_SIZES = (16, 32, 64)
EXPOSED_TOKENS = {"exposed_1k": 1024, "exposed_8k": 8192}
PARTS = ("links", "exposed", "handover")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS, help="what to measure (default: all)")
    parser.add_argument(
        "--shapes", nargs="+", choices=tuple(SHAPES), default=tuple(SHAPES), help="models of the links part"
    )
    parser.add_argument(
        "--rounds", type=positive, default=5, help="turns a figure; medians count (default: %(default)s)"
    )
    parser.add_argument("--requests", type=positive, default=400, help="of the hand-over part (default: %(default)s)")
    parser.add_argument(
        "--concurrency", type=positive, default=8, help="requests at a time there (default: %(default)s)"
    )
    parser.add_argument("--transport", default="auto", help="kv_transfer.transport there (default: %(default)s)")


def run(arguments: argparse.Namespace) -> int:
    """Measure and print; the last line of stdout is one JSON object. Raises TransferFailed where a transfer fails."""
    print(json.dumps(asyncio.run(_measure(arguments))))
    return 0


async def _measure(arguments: argparse.Namespace) -> dict[str, float]:
    figures: dict[str, float] = {}
    if "links" in arguments.parts:
        figures |= await _links(arguments.shapes, arguments.rounds)
    if "exposed" in arguments.parts:
        figures |= await _exposed(arguments.rounds)
    if "handover" in arguments.parts:
        figures |= await _handover(arguments)
    return figures


async def _links(shapes: Sequence[str], rounds: int) -> dict[str, float]:
    cases = [Case(*cell) for cell in product(shapes, PROMPT_TOKENS, BLOCK_SIZES)]
    results: list[Ratios] = []
    async with peer_process() as peer:
        for number, case in enumerate(cases, 1):
            ratios = await measure_case(peer, case, rounds)
            results.append(ratios)
            _say(
                f"links {number}/{len(cases)}  {case!s:>34}  "
                f"tcp {ratios.tcp_over_bare:.2f} of bare ({ratios.tcp_bytes_per_s / 1e9:.1f} GB/s), "
                f"shm {ratios.shm_over_memcpy:.2f} of memcpy ({ratios.shm_bytes_per_s / 1e9:.1f}), "
                f"gloo {ratios.gloo_over_bare:.2f} of bare ({ratios.gloo_bytes_per_s / 1e9:.1f}), "
                f"digest {ratios.digest_share:.2f} of tcp"
            )
    names = [field.name for field in dataclasses.fields(Ratios)]
    return {name: statistics.median(getattr(one, name) for one in results) for name in names}


async def _exposed(rounds: int) -> dict[str, float]:
    figures: dict[str, float] = {}
    with tempfile.TemporaryDirectory() as folder:
        _say("writing a random model of 12 layers x 768")
        write_random_model(Path(folder), max_position=2 * max(EXPOSED_TOKENS.values()))
        for name, tokens in EXPOSED_TOKENS.items():
            exposed: Exposed = await measure_exposed(Path(folder), tokens, rounds)
            figures[name] = exposed.share
            _say(
                f"exposed at {tokens} tokens: {exposed.handover_s * 1e3:.1f} ms of {exposed.prefill_s * 1e3:.0f} ms, "
                f"{exposed.share:.1%}, on a link of {exposed.bytes_per_s / 1e6:.0f} MB/s"
            )
    return figures


async def _handover(arguments: argparse.Namespace) -> dict[str, float]:
    handovers: list[Handover] = await measure_handovers(
        resolve_model_folder("bundled"),
        transport=arguments.transport,
        prompt_tokens=256,
        max_tokens=32,
        concurrency=arguments.concurrency,
        requests=arguments.requests,
    )
    seconds = [one.handover_s for one in handovers]
    figures = {f"handover_p{percent}_s": percentile(seconds, percent) or 0.0 for percent in (50, 99)}
    _say(
        f"hand-over, {arguments.concurrency} requests at a time: P50 {figures['handover_p50_s'] * 1e3:.1f} ms, "
        f"P99 {figures['handover_p99_s'] * 1e3:.1f} ms, the wait for the decode step under way included"
    )
    return figures


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)
