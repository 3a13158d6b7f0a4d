"""Cost of one pair's faults for the pair beside it: `python -m tests.faults.neighbours [--rounds N] [--transport
NAME]`.

A pair moves prompts of 4 MB, one after the other, all the time. Beside it another pair moves one prompt undisturbed,
and then one that a fault strikes. For each fault, in each round: the neighbours' throughput in the window around the
struck one over that in the window before. And how long until the survivors' blocks were free, in leases. The last line
of the output is JSON: medians over the rounds.
"""

import argparse
import asyncio
import contextlib
import json
import statistics
import time
from collections.abc import AsyncIterator, Awaitable, Callable

from tests.faults.children import Nursery, WorkerLost
from tests.faults.pattern_store import CONFIG
from tests.faults.rig import Rig, Transfer
from tests.faults.strikes import cut_data_link, flip_a_bit, stop_at

WINDOW_S = 3 * CONFIG.lease_s
TRANSPORTS = ("tcp", "shm", "torch_distributed")
Strike = Callable[[Rig, Transfer], Awaitable[None]]


async def nothing(_: Rig, transfer: Transfer) -> None:
    """The control: what two windows differ by on their own."""
    transfer.begin()


async def kill_source(rig: Rig, transfer: Transfer) -> None:
    await (await stop_at(rig, transfer, "source", "mid-chunk")).kill()
    await rig["target-0"].call("resume")


async def kill_target(rig: Rig, transfer: Transfer) -> None:
    await (await stop_at(rig, transfer, "target", "mid-chunk")).kill()


async def stop_source(rig: Rig, transfer: Transfer) -> None:
    await stop_at(rig, transfer, "source", "mid-chunk")
    await rig["target-0"].call("resume")


async def stop_target(rig: Rig, transfer: Transfer) -> None:
    await stop_at(rig, transfer, "target", "mid-chunk")


async def cut_link(rig: Rig, transfer: Transfer) -> None:
    await cut_data_link(rig, transfer, 1_500_000)


async def damage_all(rig: Rig, transfer: Transfer) -> None:
    await rig.arm("source-0", "before send", "stale epoch", times=1000)
    transfer.begin()
    await rig["source-0"].has_fired()


async def swallow_grant(rig: Rig, transfer: Transfer) -> None:
    await rig.arm("target-0", "before send Grant", "drop", transfer_id=transfer.transfer_id)
    transfer.begin()
    await rig["target-0"].has_fired()


STRIKES: dict[str, Strike] = {
    "none": nothing,
    "source killed": kill_source,
    "target killed": kill_target,
    "source stopped": stop_source,
    "target stopped": stop_target,
    "link cut": cut_link,
    "bit flipped": flip_a_bit,
    "all chunks damaged": damage_all,
    "grant swallowed": swallow_grant,
}


@contextlib.asynccontextmanager
async def busy(rig: Rig, source: str, target: str) -> AsyncIterator[list[float]]:
    """Move prompts from one to the other all the while; yields when each arrived."""
    arrivals: list[float] = []
    stop = asyncio.Event()

    async def run() -> None:
        while not stop.is_set():
            await rig.transfer(source, target)
            arrivals.append(time.monotonic())

    running = asyncio.create_task(run())
    try:
        yield arrivals
    finally:
        stop.set()
        await running


async def freed_after_leases(transfer: Transfer, struck_s: float) -> float:
    """Return the leases until the survivors held nothing of the transfer any more."""
    ends = []
    for end in (transfer.sent, transfer.received):
        with contextlib.suppress(WorkerLost, TimeoutError):
            async with asyncio.timeout(WINDOW_S):
                ends.append((await asyncio.shield(end()))["ended_s"])
    return (max(ends) - struck_s) / CONFIG.lease_s


async def measure(rig: Rig, strike: Strike) -> tuple[float, float]:
    """The neighbours' throughput with the fault over that before, and leases until the survivors' blocks were free."""
    async with busy(rig, "source-1", "target-1") as arrivals:
        began_s = time.monotonic()
        await rig.transfer("source-0", "target-0")
        await asyncio.sleep(max(0.0, began_s + WINDOW_S - time.monotonic()))
        before_s = time.monotonic()
        transfer = rig.prepare("source-0", "target-0")
        begun_s = time.monotonic()
        await strike(rig, transfer)
        struck_s = time.monotonic()
        leases = await freed_after_leases(transfer, struck_s)
        await asyncio.sleep(max(0.0, begun_s + WINDOW_S - time.monotonic()))
        ended_s = time.monotonic()
    for name in Rig.NAMES[::2]:
        if not rig[name].is_gone:
            rig[name].wake()
    await transfer.is_forgotten()
    before = sum(began_s < at <= before_s for at in arrivals) / (before_s - began_s)
    during = sum(begun_s < at <= ended_s for at in arrivals) / (ended_s - begun_s)
    return during / before, leases


async def main(transports: list[str], rounds: int) -> None:
    ratios: dict[str, dict[str, float]] = {}
    slowest: dict[str, float] = {}
    nursery = Nursery()
    for transport in transports:
        ratios[transport] = {}
        slowest[transport] = 0.0
        async with Rig.started(nursery, transport) as rig:
            for name, strike in STRIKES.items():
                found = []
                for _ in range(rounds):
                    found.append(await measure(rig, strike))
                    await rig.restore()
                ratio = statistics.median(each for each, _ in found)
                leases = statistics.median(each for _, each in found)
                ratios[transport][name] = round(ratio, 3)
                slowest[transport] = max(slowest[transport], round(leases, 2))
                print(f"{transport:18} {name:20} neighbours at {ratio:5.2f}, free after {leases:5.2f} leases")
    worst = min(min(each.values()) for each in ratios.values())
    print(json.dumps({"neighbours_over_before": ratios, "worst": worst, "free_after_leases": slowest}))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--transport", choices=TRANSPORTS, action="append")
    arguments = parser.parse_args()
    asyncio.run(main(arguments.transport or list(TRANSPORTS), arguments.rounds))
