"""Makes a plan's faults happen, and counts those that hit something."""

import asyncio
import contextlib
import random
from collections import Counter
from dataclasses import dataclass, field
from typing import Protocol

from tests.simulation.transfers.mangler import Mangler
from tests.simulation.transfers.plan import (
    LEASE_S,
    LINK_FAULTS,
    NETWORK_FAULTS,
    PEER_FAULTS,
    PROCESS_FAULTS,
    PROGRESS_S,
    FaultPlan,
)
from tests.simulation.transfers.sides import Process
from twostroke.simulator.memory_network import MemoryFabric, Trace
from twostroke.simulator.memory_transport import Damage, LinkFabric
from twostroke.simulator.virtual_loop import virtual_loop

TOO_LONG = 1.6
"""Leases of silence after which nobody holds on to a connection any more."""


class Stage(Protocol):
    """The processes of a run."""

    @property
    def processes(self) -> list[Process]: ...

    async def crash(self, process: Process, restart_after_s: float | None) -> None: ...


@dataclass
class Faults:
    """All faults of a run."""

    plans: tuple[FaultPlan, ...]
    fabric: MemoryFabric
    links: LinkFabric
    mangler: Mangler
    stage: Stage
    trace: Trace
    fired: Counter[str] = field(default_factory=Counter)
    lost_s: float = 0.0  # how long processes stood still or could not reach each other, summed up
    over_s: float = float("inf")  # when the last one had ended
    violations: list[str] = field(default_factory=list)
    stopped: set[Process] = field(default_factory=set)
    _damages: list[tuple[str, Damage]] = field(default_factory=list)  # to what comes next on any link
    _stalls_ordered: int = 0
    _continued_s: dict[str, float] = field(default_factory=dict)  # by host: when it last was

    async def run(self) -> None:
        """Strike when it is time; returns when all that was begun has ended."""
        self.links.damage = self._damage
        loop = asyncio.get_running_loop()
        strikes = [loop.create_task(self._strike_at(plan), name=f"fault: {plan.kind}") for plan in self.plans]
        for strike in strikes:
            await strike
        self.over_s = loop.time()

    def count(self) -> Counter[str]:
        """Return how often each kind of fault has hit something."""
        self.fired["swap bytes"] += self.links.chunks_swapped
        self.fired["stall bytes"] += self._stalls_ordered - len(self.links.stalls_s)
        for (kind, _), times in self.mangler.fired.items():
            self.fired[kind] += times
        return self.fired

    async def _strike_at(self, plan: FaultPlan) -> None:
        await asyncio.sleep(plan.at_s)
        if plan.which % 5 < 3 and plan.kind in (*NETWORK_FAULTS, *PROCESS_FAULTS, "cut a link"):
            with contextlib.suppress(TimeoutError):  # most of them in the middle of a chunk
                async with asyncio.timeout(PROGRESS_S):
                    await self.links.traffic()
        draw = random.Random(plan.which)
        for _ in range(plan.times if plan.kind in ("cut a link", "cut a connection") else 1):
            for _ in range(20):  # what does not stand yet can't be cut: try again soon
                hit = await self._strike(plan, draw)
                if hit:
                    break
                await asyncio.sleep(0.003)
            self.trace(f"fault: {plan.kind}, {'done' if hit else 'nothing to hit'}")
            if plan.kind not in (*LINK_FAULTS, *PEER_FAULTS) or plan.kind in ("cut a link", "rot a link"):
                self.fired[plan.kind] += bool(hit)

    async def _strike(self, plan: FaultPlan, draw: random.Random) -> bool:
        """Do it; False where there is nothing that it could be done to yet."""
        match plan.kind:
            case "flip a bit" | "lose bytes" | "repeat bytes":
                self._damages += [(plan.kind, _DAMAGES[plan.kind](draw))] * plan.times
            case "swap bytes":
                self.links.chunks_to_swap += plan.times
            case "stall bytes":
                self._stalls_ordered += plan.times
                self.links.stalls_s += [draw.choice((0.01, 0.1, 2 * LEASE_S))] * plan.times
            case "cut a link" | "rot a link":
                return self._spoil_a_link(draw, is_cut=plan.kind == "cut a link")
            case "cut a connection":
                return self._cut_a_connection(draw)
            case "part":
                await self._part(draw)
            case "slow messages":
                self.fabric.slowness = 4.0
                await asyncio.sleep(0.1)
                self.fabric.slowness = 1.0
            case "stop shortly" | "stop for leases":
                return await self._stop(
                    draw, draw.uniform(0.1, 0.6) if plan.kind == "stop shortly" else draw.uniform(1.7, 3.5)
                )
            case "crash" | "crash and restart":
                return await self._crash(draw, is_restarted=plan.kind == "crash and restart")
            case _:
                self.mangler.order(plan.kind, plan.which, plan.times)
        return True

    def _damage(self, data: bytearray) -> None:
        if self._damages and data:
            kind, damage = self._damages.pop(0)
            damage(data)
            self.fired[kind] += 1

    def _spoil_a_link(self, draw: random.Random, *, is_cut: bool) -> bool:
        pipes = list(self.links.pipes)
        if not pipes:
            return False
        pipe = draw.choice(pipes)
        if is_cut:
            pipe.break_off()
        else:
            pipe.is_rotten = True
        return True

    def _cut_a_connection(self, draw: random.Random) -> bool:
        connections = list(self.fabric.connections)
        if not connections:
            return False
        draw.choice(connections).cut()
        return True

    async def _part(self, draw: random.Random) -> None:
        one, other = draw.sample(self.stage.processes, 2)
        seconds = draw.choice((0.01, 0.1, LEASE_S * 2))
        self.lost_s += seconds
        self.fabric.part(one.host, other.host)
        if seconds > LEASE_S:  # a stream outlives shorter ones
            self.links.part(one.host, other.host)
        await asyncio.sleep(seconds)
        self.fabric.join(one.host, other.host)
        self.links.join(one.host, other.host)

    async def _stop(self, draw: random.Random, leases: float) -> bool:
        """SIGSTOP and SIGCONT. Before it wakes up, everybody who talked to it must have given it up, or not yet."""
        process = draw.choice(self.stage.processes)
        if process.is_dead or process in self.stopped:
            return False
        loop = virtual_loop()
        self.lost_s += leases * LEASE_S
        self.trace(f"{process.name} is stopped")
        loop.stop_process(process.name)
        self.stopped.add(process)
        await asyncio.sleep(leases * LEASE_S)
        if leases > TOO_LONG:
            self._check_given_up(process, loop.time() - TOO_LONG * LEASE_S)
        self.trace(f"{process.name} is continued")
        loop.continue_process(process.name)
        self.stopped.discard(process)
        self._continued_s[process.host] = loop.time()
        return True

    def _check_given_up(self, process: Process, before_s: float) -> None:
        excused = {other.host for other in self.stopped}  # they stood still themselves for some of that time
        excused |= {host for host, continued_s in self._continued_s.items() if continued_s > before_s}
        for connection in self.fabric.connections:
            is_old = connection.opened_s < before_s and not connection.was_cut
            if connection.peer_host == process.host and is_old and connection.host not in excused:
                self.violations.append(f"{connection.host} holds on to {process.name}, which has long been silent")

    async def _crash(self, draw: random.Random, *, is_restarted: bool) -> bool:
        process = draw.choice(self.stage.processes)
        if process.is_dead:
            return False
        await self.stage.crash(process, draw.choice((0.005, 0.05, LEASE_S)) if is_restarted else None)
        return True


def _flip(draw: random.Random) -> Damage:
    def damage(data: bytearray) -> None:
        data[draw.randrange(len(data))] ^= 1 << draw.randrange(8)

    return damage


def _lose(draw: random.Random) -> Damage:
    def damage(data: bytearray) -> None:
        start = draw.randrange(len(data))
        del data[start : start + 1 + draw.randrange(len(data))]

    return damage


def _repeat(draw: random.Random) -> Damage:
    def damage(data: bytearray) -> None:
        start = draw.randrange(len(data))
        data[start:start] = data[start:]

    return damage


_DAMAGES = {"flip a bit": _flip, "lose bytes": _lose, "repeat bytes": _repeat}
