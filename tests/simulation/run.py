"""Runs a scenario: real routers' pipelines and token channels, real workers, real KV transfer, in one process.

What must hold, whatever the seed: each client gets exactly the oracle's tokens (those before it left), each index once
and in order, and one end; afterwards no worker owns a block, no call, connection or task is left.
"""

import asyncio
import logging
from collections.abc import Callable
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any

from protocol.requests import TokenEvent
from protocol.stats import WorkerStats
from protocol.tickets import Peer
from router.pipeline import Pipeline
from router.stages import Stages
from router.token_channels import TokenChannels
from tests.simulation.fake_model import expected_tokens
from tests.simulation.memory_network import MemoryFabric, Trace
from tests.simulation.memory_transport import LinkFabric
from tests.simulation.scenario import Arrival, Fault, Scenario
from tests.simulation.sim_fleet import SECRET, SimFleet, SimProcess
from tests.simulation.virtual_loop import describe, run_virtually

RESTART_S = 0.05


class InvariantBroken(Exception):
    """What must hold does not."""


@dataclass
class Report:
    """What a run did: to see that simulations reach what they are meant to reach."""

    requests: int = 0
    finished: int = 0
    cancelled: int = 0
    tokens: int = 0
    retries: int = 0
    prefill_failures: int = 0
    fired: dict[str, int] = field(default_factory=dict)  # faults that hit something, by kind
    preemptions: int = 0
    swaps: int = 0
    prefix_hits: int = 0
    transfers_done: int = 0
    transfers_failed: int = 0
    digest_failures: int = 0
    chunk_retries: int = 0
    links_lost: int = 0
    pulled_tokens: int = 0
    steps: int = 0
    steps_ahead: int = 0
    virtual_s: float = 0.0

    def add(self, other: "Report") -> None:
        """Sum up."""
        for name, value in vars(other).items():
            if isinstance(value, dict):
                for kind, times in value.items():
                    self.fired[kind] = self.fired.get(kind, 0) + times
            else:
                setattr(self, name, getattr(self, name) + value)

    def count(self, stats: WorkerStats) -> None:
        """Add a worker's own counters."""
        self.preemptions += stats.preemptions
        self.swaps += stats.swaps
        self.prefix_hits += stats.prefix_hits
        self.transfers_done += stats.transfers_done
        self.transfers_failed += stats.transfers_failed
        self.digest_failures += stats.transfer_digest_failures
        self.chunk_retries += stats.transfer_retries
        self.links_lost += stats.transfer_links_lost
        self.pulled_tokens += stats.pulled_tokens
        self.steps += stats.steps


def run_scenario(scenario: Scenario, trace: Trace | None = None) -> Report:
    """Raises InvariantBroken, SimulationStuck, or whatever a part raises that it should not."""
    return run_virtually(_Simulation(scenario, trace).run(), limit_s=600.0)


class _Simulation:
    def __init__(self, scenario: Scenario, trace: Trace | None):
        self._scenario = scenario
        self._write = trace
        self._report = Report()
        self._errors: list[str] = []
        self._is_tracing = trace is not None

    async def run(self) -> Report:
        loop = asyncio.get_running_loop()
        loop.set_exception_handler(self._on_exception)
        self._clock = loop.time
        scenario = self._scenario
        self._fabric = MemoryFabric(scenario.seed, trace=self._trace if self._is_tracing else None)
        self._links = LinkFabric(bytes_per_s=scenario.link_bytes_per_s)
        self._fleet = SimFleet(scenario, self._fabric, self._links, self._trace)
        for _ in range(scenario.num_prefill):
            await self._fleet.start("prefill")
        for _ in range(scenario.num_decode):
            await self._fleet.start("decode")
        routers = [self._make_router(index) for index in range(scenario.num_routers)]
        faults = asyncio.create_task(self._inject(), name="faults")
        clients = [
            asyncio.create_task(self._client(arrival, routers[arrival.router][0]), name=f"client {number}")
            for number, arrival in enumerate(scenario.arrivals)
        ]
        results = await asyncio.gather(*clients, return_exceptions=True)
        await faults
        for result in results:
            if isinstance(result, BaseException):
                raise result
        await self._settle(routers)
        return self._report

    async def _client(self, arrival: Arrival, pipeline: Pipeline) -> None:
        """One client: reads its answer, or leaves in the middle."""
        await asyncio.sleep(arrival.at_s)
        expected = expected_tokens(arrival.request, self._scenario.num_layers)
        events: list[TokenEvent] = []
        stages = Stages(arrive=self._clock())
        reading = asyncio.create_task(self._read(arrival, pipeline, events, stages))
        self._report.requests += 1
        done, _ = await asyncio.wait({reading}, timeout=arrival.cancel_after_s)
        if not done:
            self._trace(f"{arrival.request.request_id}: the client leaves")
            reading.cancel()
            await asyncio.wait({reading})
        name = arrival.request.request_id
        tokens = [token.token_id for event in events for token in event.tokens]
        ends = [event.finish_reason for event in events if event.finish_reason is not None]
        self._report.tokens += len(tokens)
        self._report.retries += stages.resumes
        self._report.prefill_failures += stages.prefill_failures
        if reading.cancelled():
            self._report.cancelled += 1
            if tokens != expected[: len(tokens)]:
                raise InvariantBroken(f"{name}: {tokens} came before the client left, expected {expected}")
            return
        if (error := reading.exception()) is not None:
            raise InvariantBroken(f"{name}: failed with {error!r} after {len(tokens)} tokens") from error
        self._report.finished += 1
        if tokens != expected:
            raise InvariantBroken(f"{name}: got {tokens}, expected {expected}")
        stopped = expected[-1] in arrival.request.stop_token_ids and len(expected) > arrival.request.min_tokens
        if ends != ["stop" if stopped else "length"] or events[-1].finish_reason is None:
            raise InvariantBroken(f"{name}: ends {ends} in {len(events)} events")

    async def _read(self, arrival: Arrival, pipeline: Pipeline, events: list[TokenEvent], stages: Stages) -> None:
        next_index = 0
        async with aclosing(pipeline.generate(arrival.request, stages)) as answer:
            async for event in answer:
                self._trace(f"{arrival.request.request_id} gets {event}")
                if event.index != next_index or event.error is not None:
                    raise InvariantBroken(f"{arrival.request.request_id}: {event} in place of token {next_index}")
                next_index += len(event.tokens)
                events.append(event)

    def _make_router(self, index: int) -> tuple[Pipeline, TokenChannels]:
        peer = Peer(f"router-{index}", index + 1)
        channels = TokenChannels(network=self._fabric.at(peer.worker_id), peer=peer, clock=self._clock)
        pipeline = Pipeline(
            fleet=self._fleet,
            channels=channels,
            secret=SECRET,
            clock=self._clock,
            router=peer,
            config=self._scenario.pipeline,
            draw_id=_numbered(f"r{index}"),
        )
        return pipeline, channels

    async def _settle(self, routers: list[tuple[Pipeline, TokenChannels]]) -> None:
        """Everything has been answered: soon nobody must hold anything any more."""
        for pipeline, _ in routers:
            if pipeline.in_flight:
                raise InvariantBroken(f"a router counts {pipeline.in_flight} calls after all have ended")
        for process in self._fleet.processes.values():
            try:
                async with asyncio.timeout(30.0):
                    await process.worker.drain()
            except TimeoutError as error:
                raise InvariantBroken(f"{process.host} does not become idle: {process.worker.stats()}") from error
        await self._fleet.close()
        for process in self._fleet.processes.values():
            self._check_idle(process)
        for _, channels in routers:
            await channels.close()
        for process in list(self._fleet.processes.values()):
            await self._fleet.end(process)
        for process in (*self._fleet.processes.values(), *self._fleet.departed):
            process.pool.check_integrity()
            if process.pool.owned_blocks:
                raise InvariantBroken(f"{process.pool.owned_blocks} blocks of {process.host} outlive it")
            if process.worker.stats().swapped_blocks:
                raise InvariantBroken(f"{process.host} leaves swapped KV behind: {process.worker.stats()}")
            if process.store.violations:
                raise InvariantBroken(f"{process.host}: " + "; ".join(process.store.violations))
            self._report.count(process.worker.stats())
            self._report.steps_ahead += process.engine.num_steps_ahead
        await asyncio.sleep(1.0)  # closing messages are still under way
        tasks = asyncio.all_tasks() - {asyncio.current_task()}
        if tasks:
            raise InvariantBroken("tasks are left: " + "; ".join(describe(task) for task in tasks))
        if self._fleet.num_calls or self._fabric.connections or self._fabric.listeners or self._links.pending:
            raise InvariantBroken(
                f"left: {self._fleet.num_calls} calls, {len(self._fabric.connections)} connections, "
                f"{len(self._fabric.listeners)} listeners, {len(self._links.pending)} links"
            )
        if self._errors:
            raise InvariantBroken("; ".join(self._errors))
        self._report.virtual_s = self._clock()

    def _check_idle(self, process: SimProcess) -> None:
        process.pool.check_integrity()
        stats = process.worker.stats()
        busy = stats.num_waiting, stats.num_running, stats.num_waiting_tokens, stats.num_transfers
        if process.pool.owned_blocks or any(busy):
            raise InvariantBroken(f"{process.host} is not idle: {stats}")
        if stats.free_blocks != stats.total_blocks:
            raise InvariantBroken(f"{process.host} lost blocks: {stats}")

    async def _inject(self) -> None:
        for fault in self._scenario.faults:
            await asyncio.sleep(max(0.0, fault.at_s - self._clock()))
            for _ in range(20):  # a link that does not stand yet can't be cut: try again soon
                hit = await self._strike(fault)
                if hit:
                    break
                await asyncio.sleep(0.005)
            self._trace(f"fault {fault.kind}: {'hit' if hit else 'nothing to hit'}")
            self._report.fired[fault.kind] = self._report.fired.get(fault.kind, 0) + bool(hit)

    async def _strike(self, fault: Fault) -> int:
        """Do what `fault` says; returns how much it hit."""
        fleet, fabric, links = self._fleet, self._fabric, self._links
        prefill = self._pick("prefill", fault.which)
        decode = self._pick("decode", fault.which // 7)
        pair = (prefill.host, decode.host) if prefill is not None and decode is not None else ("", "")
        match fault.kind:
            case "cut_transfers":
                return fabric.cut(*pair) + links.cut(*pair)
            case "cut_links":
                return links.cut(*pair)
            case "part_transfers":
                fabric.part(*pair)
                hit = links.part(*pair)
                for network in (fabric, links):
                    asyncio.get_running_loop().call_later(3.0, network.join, *pair)
                return hit
            case "block_transfers":
                fabric.part(*pair)
                links.part(*pair)
                for network in (fabric, links):
                    asyncio.get_running_loop().call_later(3.0, network.join, *pair)
                return prefill is not None and decode is not None
            case "damage":
                links.damage = _damage_next(1 + fault.which % 2)
                return 1
            case "refuse_prefill":
                fleet.prefills_to_refuse += 1 + fault.which % 3
                return 1
            case "lose_prefill_reply":
                fleet.prefill_replies_to_lose += 1 + fault.which % 2
                return 1
            case "kill_prefill" if prefill is not None:
                return await self._replace(prefill, "prefill")
            case "kill_decode" if decode is not None:
                return await self._replace(decode, "decode")
            case "fail_engine":
                victim = decode if prefill is None or fault.which % 2 else prefill
                if victim is None:
                    return 0
                victim.engine.fail_at_step = victim.engine.num_steps + 1
                await asyncio.sleep(0.2)  # the deployment notices by check_health, and replaces it
                return await self._replace(victim, victim.info.role)
            case "cut_channel":
                victim = decode if decode is not None else prefill
                return (
                    0
                    if victim is None
                    else fabric.cut(victim.host, f"router-{fault.which % self._scenario.num_routers}")
                )
        return 0

    async def _replace(self, process: SimProcess, role: str) -> int:
        if process.info.peer not in self._fleet.processes:
            return 0
        self._fleet.crash(process)
        await asyncio.sleep(RESTART_S)
        await self._fleet.start(role)
        return 1

    def _pick(self, role: str, which: int) -> SimProcess | None:
        able = [process for process in self._fleet.processes.values() if process.info.role == role]
        return able[which % len(able)] if able else None

    def _trace(self, line: str) -> None:
        if self._write is not None:
            self._write(f"{self._clock():12.6f} {line}")

    def _on_exception(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        self._errors.append(f"{context.get('message')}: {context.get('exception')!r}")


def _numbered(prefix: str) -> Callable[[], str]:
    number = 0

    def draw() -> str:
        nonlocal number
        number += 1
        return f"{prefix}-{number}"

    return draw


def _damage_next(times: int) -> Callable[[bytearray], None]:
    left = times

    def damage(data: bytearray) -> None:
        nonlocal left
        if left > 0:
            left -= 1
            data[len(data) // 2] ^= 0x40

    return damage


def quiet_logs() -> None:
    """Warnings of aborted transfers and lost routers are what a simulation is made of."""
    for name in ("router", "prefill_worker", "decode_worker", "protocol", "model", "kvtransfer"):
        logging.getLogger(name).setLevel(logging.CRITICAL)
