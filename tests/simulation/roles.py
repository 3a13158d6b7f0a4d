"""Compare roles for mixed prompts and answers, many at once: `python -m tests.simulation.roles`; takes minutes.

Users ask again as soon as they have their answer: prompts of 64 to 1,024 tokens, answers of 16 to 128. The exact
simulation serves them with Llama-3.1-8B's floors on an H100 in three modes: aggregated (as many GPUs), `router.roles:
fixed`, and flexible roles. Where all workers share one GPU, a step takes longer for each other worker that computes:
by itself again where the GPU is time-sliced, by half of itself where kernels overlap (assumed). The last line is JSON.
"""

import argparse
import json
import random
import statistics
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass

from msgspec import structs

from twostroke.loadtests.report.estimates import percentile
from twostroke.planning.costs.profiles import H100
from twostroke.planning.exact import unheard
from twostroke.planning.layouts import Mode, router_settings
from twostroke.protocol.stats import StepCosts
from twostroke.simulator.deployment import TracedRequest, Users, serve
from twostroke.worker.profile import WorkerProfile

WARM = 36
FLEETS = ((1, 1), (1, 2), (2, 1))
MODES: tuple[Mode, ...] = ("aggregated", "fixed", "hybrid")
SHARED = {"own GPUs": None, "one GPU, time-sliced": 2.0, "one GPU, overlapping": 1.5}
"""Factor by which a step takes longer while one other worker computes."""
FREE_BYTES = 72e9 - 16e9
"""Bytes of an H100 that one copy of the weights leaves, at `gpu_memory_utilization: 0.9`."""


@dataclass(frozen=True)
class Figures:
    """Outcome of one mode."""

    gpus: str
    fleet: str
    mode: Mode
    users: int
    tokens_per_s: float
    ttft_p50_s: float
    ttft_p90_s: float
    itl_p99_s: float
    by_prefill: float  # share of answers that prefill workers ended
    moves: int

    def row(self) -> str:
        return (
            f"| {self.gpus} | {self.fleet} | {self.users} | {self.mode} | {self.tokens_per_s:.0f} | "
            f"{1e3 * self.ttft_p50_s:.0f} / {1e3 * self.ttft_p90_s:.0f} | {1e3 * self.itl_p99_s:.0f} | "
            f"{self.by_prefill:.0%} | {self.moves} |"
        )


def named_profile(factor: float | None, num_workers: int) -> WorkerProfile:
    """Return a worker of `num_workers` that share a GPU, unless there is no `factor`."""
    if factor is None:
        return H100
    costs = H100.costs
    beside = StepCosts(*(factor * one for one in structs.astuple(costs)[:5]))
    left = (FREE_BYTES - (num_workers - 1) * 16e9) / num_workers / H100.kv_bytes
    return structs.replace(H100, beside=beside, kv_tokens=int(left))


def asked() -> Iterator[TracedRequest]:
    """Yield requests for ever."""
    draw = random.Random(1)
    while True:
        prompt, answer = draw.randint(64, 1024), draw.randint(16, 128)
        yield TracedRequest(0.0, tuple(draw.choices(range(30_000), k=prompt)), answer)


def figures_of(gpus: str, fleet: tuple[int, int], mode: Mode, users: int, seconds: float) -> Figures:
    """Serve the users for so many seconds."""
    prefill, decode = fleet
    factor = SHARED[gpus]
    if mode == "aggregated":
        prefill, decode = 0, 1 if factor else sum(fleet)
    profile = named_profile(factor, prefill + decode)
    with unheard():
        run = serve(
            asked(),
            "kv_aware",
            profile,
            users=Users(users, 0.0, seconds),
            **router_settings(mode),
            prefill=prefill,
            decode=decode,
            prefill_cache_tokens=profile.kv_tokens,
            decode_cache_tokens=profile.kv_tokens,
            warm=WARM,
        )
    served = [one for one in run.served if one.token_s]
    gaps = [after - before for one in served for before, after in zip(one.token_s, one.token_s[1:], strict=False)]
    tokens = sum(moment < seconds for one in run.served for moment in one.token_s)
    ttft = [one.ttft_s for one in served]
    return Figures(
        gpus,
        f"{fleet[0]}+{fleet[1]}",
        mode,
        users,
        tokens / seconds,
        percentile(ttft, 50),
        percentile(ttft, 90),
        percentile(gaps, 99),
        statistics.fmean(one.ended_at == "prefill" for one in served),
        sum(one.num_moves for one in served),
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--users", type=int, nargs="+", default=[32, 128])
    parser.add_argument("--gpus", nargs="+", choices=list(SHARED), default=list(SHARED))
    parser.add_argument("--seconds", type=float, default=30.0)
    parser.add_argument("--processes", type=int, default=1)
    options = parser.parse_args()
    jobs = [
        (gpus, fleet, mode, users, options.seconds)
        for users in options.users
        for gpus in options.gpus
        for fleet in FLEETS
        for mode in MODES
    ]
    print("| GPUs | prefill+decode | users | mode | tokens/s | TTFT P50 / P90, ms | ITL P99, ms | P writes | moves |")
    print("|---|---|---|---|---|---|---|---|---|")
    found: list[Figures] = []
    with ProcessPoolExecutor(options.processes) as pool:
        for one in pool.map(figures_of, *zip(*jobs, strict=True)):
            found.append(one)
            print(one.row(), flush=True)
    print(json.dumps([asdict(one) for one in found]))


if __name__ == "__main__":
    main()
