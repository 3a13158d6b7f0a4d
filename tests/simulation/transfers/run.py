"""Runs a plan: KVSender and KVReceiver unchanged, several of each, and nobody above them but these few lines.

What must hold, whatever the seed:
- KV that counts as verified is what the source computed, byte by byte, and stays so until its blocks are freed;
- it is verified only for a genuine ticket, once, by the incarnation that the ticket names;
- nobody writes into a block, or sends it on a stream, once the transfer that had it has ended;
- a source that hears that its KV is verified is not deceived, as long as targets don't lie;
- every transfer ends on both sides within a few leases, and a silent peer's connection within one and a half; so does
  a transfer whose peer has crashed, and where nothing goes wrong one that its own side or the other has given up;
- where nothing goes wrong every transfer that both sides want arrives; so does one that begins when all faults are
  past;
- afterwards no block, task, connection, listener or link is left.
"""

import asyncio
import random
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from tests.simulation.replay import Counts
from tests.simulation.transfers.faults import TOO_LONG, Faults
from tests.simulation.transfers.mangler import Mangler
from tests.simulation.transfers.plan import LEASE_S, PROGRESS_S, Plan, TransferPlan, make_plan
from tests.simulation.transfers.sides import SECRET, Process, Side, Sides, cuts_of
from twostroke.protocol.requests import Peer, Ticket, mint_ticket
from twostroke.simulator.memory_network import MemoryFabric, Trace
from twostroke.simulator.memory_store import Array
from twostroke.simulator.memory_transport import LinkFabric
from twostroke.simulator.virtual_loop import describe, run_virtually

END_S = 4 * PROGRESS_S + 2 * LEASE_S
"""Seconds that a transfer may take beyond what its two sides take on purpose and what faults take from everybody."""


@dataclass
class Report(Counts):
    """Counts of what lifecycles did."""

    transfers: int = 0
    late: int = 0  # begun when all faults were past
    outcomes: Counter[str] = field(default_factory=Counter)
    fired: Counter[str] = field(default_factory=Counter)  # faults that hit something
    mangled: Counter[tuple[str, str]] = field(default_factory=Counter)  # (peer's fault, message type)
    acts: Counter[str] = field(default_factory=Counter)
    digest_failures: int = 0
    links_lost: int = 0
    virtual_s: float = 0.0


def run_plan(plan: Plan, trace: Trace | None = None) -> Report:
    """Raises AssertionError where something does not hold, SimulationStuck, or what a part raises and should not."""
    return run_virtually(_World(plan, trace).run(), limit_s=60.0)


def run_seed(seed: int, trace: Trace | None = None) -> Report:
    """The same for a seed's plan."""
    return run_plan(make_plan(seed), trace)


class _World:
    def __init__(self, plan: Plan, trace: Trace | None):
        self._plan = plan
        self._write = trace
        self._report = Report()
        self._problems: list[str] = []
        self._ended: dict[tuple[int, str], str] = {}  # by transfer and side: how it ended
        self._span: dict[tuple[int, str], tuple[float, float]] = {}  # from when to when

    async def run(self) -> Report:
        plan, loop = self._plan, asyncio.get_running_loop()
        loop.set_exception_handler(self._on_exception)
        self._clock = loop.time
        self._trace(str(plan))
        self._draw = random.Random(plan.seed)
        self._fabric = MemoryFabric(plan.seed, trace=self._trace if self._write is not None else None)
        self._links = LinkFabric(bytes_per_s=plan.link_bytes_per_s, window_bytes=plan.window_bytes, establish_s=LEASE_S)
        self._mangler = self._fabric.mangle = Mangler(self._links, plan.links_from)
        self._processes = [await self._start(number) for number in range(len(plan.workers))]
        self._departed: list[Process] = []
        self._sides = Sides(plan, self._processes, self._mangler.known_ids, self._problems, self._trace)
        self._watches: list[asyncio.Task[None]] = []
        self._faults = Faults(plan.faults, self._fabric, self._links, self._mangler, self, self._trace)
        faults = asyncio.create_task(self._faults.run(), name="faults")
        transfers = [asyncio.create_task(self._transfer(one), name=f"transfer {one.number}") for one in plan.transfers]
        for task in (faults, *transfers):
            await task
        for watch in self._watches:
            await watch
        await self._settle()
        return self._report

    # --- processes (the faults' calls) ---

    @property
    def processes(self) -> list[Process]:
        """Those that live."""
        return self._processes

    async def crash(self, process: Process, restart_after_s: float | None) -> None:
        """End a process at once, and start another in its place, now or at the end."""
        self._trace(f"{process.name} crashes")
        process.is_dead = True
        for rank in process.ranks:
            rank.network.is_dead = True
        self._fabric.remove(process.host)
        self._links.cut(process.host)
        self._departed.append(process)
        bereft = self._bereft_of(process)
        for task in tuple(process.tasks):
            task.cancel()
        await process.close()
        watch = asyncio.create_task(self._check_bereft(process, bereft), name=f"watch over the peers of {process.name}")
        self._watches.append(watch)
        if restart_after_s is not None:
            await asyncio.sleep(restart_after_s)
            self._processes[process.number] = await self._start(process.number)

    def _bereft_of(self, process: Process) -> list[tuple[str, Side]]:
        """The sides of transfers whose peer this process is: they know each other, and have to end soon."""
        granted = {transfer_id for _, transfer_id in self._mangler.granted}
        return [
            (f"the {side} of transfer {number}", held)
            for (number, side), held in self._sides.open.items()
            if (side == "source" and held.ticket.target == process.peer)
            or (side == "target" and held.ticket.source == process.peer and held.ticket.transfer_id in granted)
        ]

    async def _check_bereft(self, process: Process, bereft: list[tuple[str, Side]]) -> None:
        before_s, was_calm = self._faults.lost_s, not self._faults.stopped
        await asyncio.sleep(TOO_LONG * LEASE_S)
        if not was_calm or self._faults.lost_s != before_s:
            return  # some stood still, or could not reach others
        for what, held in bereft:
            # With several ranks, one may never have heard of the other's.
            is_single = len(held.transfers) == 1 and held.ticket.source_cut.ranks == 1
            if is_single and not held.transfers[0].ended and not held.process.is_dead:
                self._problems.append(f"{what} holds on to {process.name}, which has crashed")

    async def _start(self, number: int) -> Process:
        process = Process(self._plan, number, self._draw.getrandbits(63), self._fabric, self._links)
        await process.start()
        return process

    # --- transfers ---

    async def _transfer(self, one: TransferPlan) -> None:
        """Mint the ticket, and let both sides act on it."""
        await asyncio.sleep(one.at_s)
        self._report.transfers += 1
        is_late = self._plan.recovers and self._faults.over_s < self._clock() - LEASE_S
        source, target = self._processes[one.source], self._processes[one.target]
        ticket = mint_ticket(
            SECRET,
            f"r{one.number}",
            _formerly(source.peer) if one.source_act == "open stale" else source.peer,
            _formerly(target.peer) if one.target_act == "expect stale" else target.peer,
            target.addresses,
            **cuts_of(source, target),
        )
        truth = self._make_truth(one)
        self._report.acts[f"source: {one.source_act}"] += 1
        self._report.acts[f"target: {one.target_act}"] += 1
        self._report.acts["forger"] += one.is_forged
        sides = (
            self._at(one.source, one.source_delay_s, one, "source", ticket, truth),
            self._at(one.target, one.target_delay_s, one, "target", ticket, truth),
        )
        await asyncio.gather(*sides)
        self._judge(one, is_late=is_late)

    def _make_truth(self, one: TransferPlan) -> Array:
        """KV of [layer, token, kinds, head, 1]."""
        shape = (self._plan.num_layers, one.num_tokens, self._plan.kinds, self._plan.num_kv_heads, 1)
        return np.frombuffer(self._draw.randbytes(2 * int(np.prod(shape))), np.uint16).reshape(shape)

    async def _at(
        self, number: int, delay_s: float, one: TransferPlan, side: str, ticket: Ticket, truth: Array
    ) -> None:
        """One side of a transfer, at the incarnation of the worker that lives when its turn comes."""
        await asyncio.sleep(delay_s)
        process = self._processes[number]
        if process.is_dead:
            self._ended[one.number, side] = "dead"
            return
        run = self._sides.send if side == "source" else self._sides.receive
        began = self._clock()
        work = process.spawn(run(process, one, ticket, truth), f"{side} of transfer {one.number}")
        await asyncio.wait({work})
        self._sides.open.pop((one.number, side), None)
        self._span[one.number, side] = began, self._clock()
        outcome = "dead" if work.cancelled() or process.is_dead else work.result()
        self._trace(f"{side} of transfer {one.number}: {outcome}")
        self._ended[one.number, side] = outcome
        took_s = self._clock() - began - self._faults.lost_s - one.hold_s - one.compute_s(self._plan.num_layers)
        took_s -= one.room_s
        if took_s > END_S:
            self._problems.append(f"the {side} of transfer {one.number} took {took_s:.2f} s to its end")

    def _judge(self, one: TransferPlan, *, is_late: bool) -> None:
        source, target = self._ended[one.number, "source"], self._ended[one.number, "target"]
        self._report.outcomes[f"source {source}"] += 1
        self._report.outcomes[f"target {target}"] += 1
        if source == "released" and target in ("failed", "refused") and not self._mangler.targets_lie:
            self._problems.append(f"the source of transfer {one.number} was told that all is verified, and it is not")
        if self._plan.is_calm:
            self._judge_end(one)
        wanted = one.source_act == "send" and one.target_act in ("expect", "wait for the offer", "wait for room")
        self._report.late += wanted and is_late
        if wanted and (self._plan.is_harmless or is_late) and (source, target) != ("released", "verified"):
            self._problems.append(f"transfer {one.number} should have arrived, and is {source} and {target}")

    def _judge_end(self, one: TransferPlan) -> None:
        """A side that gives up ends at once, and the other as soon as it hears of it."""
        (source_began, source_ended), (target_began, target_ended) = (
            self._span[one.number, side] for side in ("source", "target")
        )
        late_s = 0.0
        if one.source_act == "abort":
            late_s = source_ended - source_began - one.compute_s(self._plan.num_layers)
        if one.source_act in ("abort", "decline") and one.target_act != "never expect":
            late_s = max(late_s, target_ended - one.hold_s - one.room_s - max(source_ended, target_began))
        if one.target_act in ("abort", "cancel"):
            late_s = max(late_s, target_ended - one.hold_s - target_began)
        if one.target_act in ("abort", "cancel", "refuse") and one.source_act == "send":
            late_s = max(late_s, source_ended - one.compute_s(self._plan.num_layers) - max(target_ended, source_began))
        if late_s > LEASE_S:
            self._problems.append(f"transfer {one.number} was given up, and went on for {late_s:.2f} s")

    # --- the end ---

    async def _settle(self) -> None:
        """Everything has ended: nobody must hold anything any more."""
        self._sides.check_offers()
        for process in self._processes:
            while process.tasks:
                await asyncio.wait(tuple(process.tasks))
            if process.is_dead:
                continue
            for rank in process.ranks:
                rank.pool.check_integrity()
                if rank.pool.owned_blocks:
                    self._problems.append(f"{rank.pool.owned_blocks} blocks of {process.name} are left")
                for side in (rank.sender.stats, rank.receiver.stats):
                    if side.in_flight:
                        self._problems.append(f"{side.in_flight} transfers of {process.name} are left")
        for process in self._processes:
            await process.close()
        for process in (*self._processes, *self._departed):
            if process.links_left:
                self._problems.append(f"{process.links_left} links of {process.name} are not closed")
        for process in self._processes:
            for rank in process.ranks:
                self._problems += [f"{process.name}: {violation}" for violation in rank.store.violations]
                self._report.digest_failures += rank.receiver.stats.digest_failures
                self._report.links_lost += rank.sender.stats.links_lost
        await asyncio.sleep(1.0)  # closing messages are still under way
        tasks = asyncio.all_tasks() - {asyncio.current_task()}
        if tasks:
            self._problems.append("tasks are left: " + "; ".join(describe(task) for task in tasks))
        for what, left in (
            ("connections", self._fabric.connections),
            ("listeners", self._fabric.listeners),
            ("prepared links", self._links.pending),
            ("links", self._links.pipes),
        ):
            if left:
                self._problems.append(f"{len(left)} {what} are left")
        self._problems += self._mangler.violations
        self._problems += self._faults.violations
        assert not self._problems, "; ".join(self._problems)
        self._report.fired = self._faults.count()
        self._report.mangled = self._mangler.fired
        self._report.virtual_s = self._clock()

    def _trace(self, line: str) -> None:
        if self._write is not None:
            self._write(f"{self._clock():12.6f} {line}")

    def _on_exception(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        self._problems.append(f"{context.get('message')}: {context.get('exception')!r}")


def _formerly(peer: Peer) -> Peer:
    """Another incarnation of the same worker."""
    return Peer(peer.worker_id, 1)
