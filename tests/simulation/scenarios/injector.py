"""Makes a scenario's faults happen, and counts those that hit something."""

import asyncio
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

from tests.simulation.blind_router import BlindRouter
from tests.simulation.scenarios.scenario import ROUTER_LEASE_S, Fault
from tests.simulation.scenarios.tiered import STORAGE_FAULTS
from twostroke.protocol.errors import WorkerLost
from twostroke.protocol.messages import BlocksChanged, BlocksHeld, Message
from twostroke.protocol.stats import STEP_ROLES, Role
from twostroke.simulator.memory_network import MemoryConnection, MemoryFabric, Trace
from twostroke.simulator.memory_transport import LinkFabric
from twostroke.simulator.sim_fleet import NOTICE_S, SimFleet, SimProcess
from twostroke.simulator.virtual_loop import virtual_loop

SHORT_S = (0.05, 0.4, 1.0)
LONG_S = (
    3.0,
    7.0,
    15.0,
)  # beyond a transfer's lease, a router's patience with a silent channel, a token channel's lease


_MOST_CALLS = {"refuse_prefill": 3, "lose_prefill_reply": 2, "late_calls": 4, "repeat_calls": 4}
"""Number of calls that a fault of this kind spoils."""


@dataclass
class Injector:
    """All faults of a run."""

    faults: tuple[Fault, ...]
    fleet: SimFleet
    fabric: MemoryFabric
    links: LinkFabric
    routers: list[BlindRouter]
    trace: Trace
    fired: Counter[str] = field(default_factory=Counter)
    # A worker and a router that has missed its last news of its blocks.
    behind: set[tuple[str, str]] = field(default_factory=set)
    violations: list[str] = field(default_factory=list)

    async def run(self) -> None:
        """Strike when it is time; returns when all that was begun has ended."""
        strikes = [asyncio.create_task(self._strike_at(fault), name=f"fault {fault.kind}") for fault in self.faults]
        for strike in strikes:
            await strike

    async def _strike_at(self, fault: Fault) -> None:
        await asyncio.sleep(fault.at_s)
        for _ in range(
            1 if fault.kind == "lose_block_news" else 20
        ):  # a link that does not stand yet can't be cut: try again soon
            hit = await self._strike(fault)
            if hit:
                break
            await asyncio.sleep(0.005)
        self.trace(f"fault {fault.kind}: {'hit' if hit else 'nothing to hit'}")
        self.fired[fault.kind] += bool(hit)

    async def _strike(self, fault: Fault) -> int:
        """Do what `fault` says; returns how much it hit."""
        fleet, which = self.fleet, fault.which
        prefill, decode = self._pick("prefill", which), self._pick("decode", which // 7)
        match fault.kind:
            case "damage":
                self.links.damage = _damage_next(1 + which % 2)
                return 1
            case "refuse_prefill" | "lose_prefill_reply" | "late_calls" | "repeat_calls":
                fleet.calls_to_spoil[fault.kind] += 1 + which % _MOST_CALLS[fault.kind]
                return 1
            case "lose_block_news":
                return self._lose_block_news(1 + which % 3)
            case "lose_router":
                return await self._lose_router(which)
            case "hang_storage":
                return await self._hang_storage(which)
        if fault.kind in STORAGE_FAULTS:
            names = sorted(fleet.storage.blobs)
            if names:
                fleet.storage.blobs[names[which % len(names)]].faults[fault.kind] += 1 + which % 4
            return len(names)
        if decode is None:
            return 0
        match fault.kind:
            case "kill_decode" | "stop_decode" | "silence_decode" | "drain_decode" | "role_decode":
                return await self._strike_worker(fault.kind.removesuffix("_decode"), decode, which)
            case "cut_channel":
                return self.fabric.cut(decode.host, self._router_host(which))
            case "fail_engine" | "hang_engine" | "slow_worker":
                victim = decode if prefill is None or which % 2 else prefill
                return await self._strike_worker(fault.kind, victim, which)
        if fault.kind.endswith("_prefill"):
            return (
                0 if prefill is None else await self._strike_worker(fault.kind.removesuffix("_prefill"), prefill, which)
            )
        source = prefill or self._pick("decode", which // 7 + 1)
        if source is None or source is decode:
            return 0
        return await self._strike_pair(fault.kind, source.host, decode.host, which)

    async def _strike_worker(self, what: str, victim: SimProcess, which: int) -> int:
        match what:
            case "kill":
                return await self.fleet.replace(victim)
            case "drain":
                return await self.fleet.replace(victim, drain_s=_draw(which, (0.01, 0.1, 5.0)))
            case "role":
                role = STEP_ROLES[which % len(STEP_ROLES)]
                self.trace(f"{victim.host} becomes a {role} worker")
                victim.worker.change_role(role)
            case "stop":
                self.trace(f"{victim.host} is stopped")
                virtual_loop().stop_process(victim.host)
                await asyncio.sleep(_draw(which, SHORT_S + LONG_S))
                self.trace(f"{victim.host} goes on")
                virtual_loop().continue_process(victim.host)
            case "silence":
                router = self._router_host(which)
                self.fabric.silence(victim.host, router)
                await asyncio.sleep(_draw(which, SHORT_S + LONG_S))
                self.fabric.end_silence(victim.host, router)
            case "fail_engine":
                victim.engine.fail_at_step = victim.engine.num_steps + 1
                await asyncio.sleep(0.5)  # so that the worker is replaced, where it came to that step
            case "hang_engine":
                return await self._hang_engine(victim)
            case "slow_worker":
                victim.engine.slowness = _draw(which, (10.0, 50.0))
                await asyncio.sleep(_draw(which, (0.3, 2.0)))
                victim.engine.slowness = 1.0
            case _:
                raise ValueError(f"there is no fault {what}")
        return 1

    async def _hang_engine(self, victim: SimProcess) -> int:
        """Let the next step not end, if there is one soon, until the worker notices and its deployment replaces it."""
        steps = victim.engine.num_steps
        victim.engine.released.clear()
        await asyncio.sleep(0.05)
        if victim.engine.num_steps == steps:
            victim.engine.released.set()
            return 0
        self.trace(f"the engine of {victim.host} hangs")
        while victim.info.peer in self.fleet.processes:
            await asyncio.sleep(0.1)
            try:
                victim.worker.check_health()
            except WorkerLost:
                break
        victim.engine.released.set()  # the step ends at last, and must change nothing
        await asyncio.sleep(NOTICE_S)
        return await self.fleet.replace(victim)

    async def _strike_pair(self, what: str, source: str, target: str, which: int) -> int:
        match what:
            case "cut_transfers":
                return self.fabric.cut(source, target) + self.links.cut(source, target)
            case "cut_links":
                return self.links.cut(source, target)
            case "silence_transfers":
                self.fabric.silence(source, target)
                await asyncio.sleep(_draw(which, SHORT_S + LONG_S))
                self.fabric.end_silence(source, target)
                return 1
            case "part_transfers" | "block_transfers":
                self.fabric.part(source, target)
                hit = self.links.part(source, target)
                for network in (self.fabric, self.links):
                    asyncio.get_running_loop().call_later(3.0, network.join, source, target)
                return hit or what == "block_transfers"
        raise ValueError(f"there is no fault {what}")

    def _lose_block_news(self, times: int) -> int:
        left = times

        def drop(connection: MemoryConnection, message: Message) -> tuple[Message, ...]:
            nonlocal left
            pair = connection.host, connection.peer_host
            if isinstance(message, BlocksChanged) and left > 0:
                left -= 1
                self.behind.add(pair)
                self.fired["lose_block_news"] += 1
                return ()
            if isinstance(message, BlocksChanged | BlocksHeld):
                self.behind.discard(pair)
            return (message,)

        self.fabric.mangle = drop
        return 0  # counted above

    async def _hang_storage(self, which: int) -> int:
        storage = self.fleet.storage
        names = sorted(storage.calls)
        calls = storage.calls[names[which % len(names)]] if names else []
        for one in calls:
            one.hang()
        await asyncio.sleep(_draw(which, SHORT_S + LONG_S))
        for one in calls:
            one.go_on()
        return len(calls)

    async def _lose_router(self, which: int) -> int:
        router = self.routers[which % len(self.routers)]
        router.lose()
        self.fleet.lost_routers.add(router.host)
        processes = list(self.fleet.processes.values())
        for process in processes:
            process.engine.slowness = 200.0  # so that its requests would outlast its lease
        if which % 2:
            self.fabric.remove(router.host)
        else:
            for process in processes:
                self.fabric.silence(router.host, process.host)
        await asyncio.sleep(2 * ROUTER_LEASE_S)
        # Workers that stood still meanwhile have not listened for a lease yet.
        is_excused = any(other.kind in ("stop_prefill", "stop_decode") for other in self.faults)
        if (left := self.fleet.worker_calls(router.host)) and not is_excused:
            self.violations.append(f"{left} calls of {router.host} outlive it by two leases")
        for process in processes:
            process.engine.slowness = 1.0
        return 1

    def _router_host(self, which: int) -> str:
        return self.routers[which % len(self.routers)].host

    def _pick(self, role: Role, which: int) -> SimProcess | None:
        able = [process for process in self.fleet.processes.values() if process.info.role == role]
        return able[which % len(able)] if able else None


def _draw(which: int, choices: tuple[float, ...]) -> float:
    return choices[which // 3 % len(choices)]


def _damage_next(times: int) -> Callable[[bytearray], None]:
    left = times

    def damage(data: bytearray) -> None:
        nonlocal left
        if left > 0:
            left -= 1
            data[len(data) // 2] ^= 0x40

    return damage
