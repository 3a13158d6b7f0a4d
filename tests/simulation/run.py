"""Runs a scenario: real routers' pipelines and token channels, real workers, real KV transfer, in one process.

What must hold, whatever the seed: each client gets exactly the oracle's tokens (those before it left), each index once
and in order, and one end, soon; where nothing goes wrong, no prompt is computed twice; the blocks of a lost router's
requests are free within a lease; afterwards no worker owns a block, no call, connection or task is left. Only these
requests may fail: in an overload with status 429, before the first token; those that kill engines, of which they get
two at most; and, taken for such, one that two other faults have met on two workers in a row.
"""

import asyncio
import logging
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any

from tests.simulation.arrivals import Arrival
from tests.simulation.fake_model import expected_tokens
from tests.simulation.fault_plan import DEADLY_FAULTS
from tests.simulation.injector import Injector
from tests.simulation.memory_network import MemoryFabric, Trace
from tests.simulation.memory_transport import LinkFabric
from tests.simulation.report import Report
from tests.simulation.scenario import Scenario
from tests.simulation.sim_fleet import SimFleet, SimProcess, virtual_loop
from tests.simulation.sim_router import SimRouter
from tests.simulation.virtual_loop import describe, run_virtually
from twostroke.protocol.blocks import short_name
from twostroke.protocol.errors import RequestError, TwostrokeError
from twostroke.protocol.requests import TokenEvent
from twostroke.router.health.poison import PoisonRequest
from twostroke.router.observe.stages import Stages

MOST_WAIT_S = 45.0
"""Nobody waits longer for an answer, faults included: the longest of those lasts 15 s."""
MOST_POISONED = 3
"""Engines that requests which kill them may have, over all their repetitions; two but for rare cases."""


class InvariantBroken(Exception):
    """What must hold does not."""


@dataclass
class _Answer:
    """What a client has got."""

    events: list[TokenEvent] = field(default_factory=list)

    @property
    def tokens(self) -> list[int]:
        return [token.token_id for event in self.events for token in event.tokens]

    @property
    def ends(self) -> list[str]:
        return [event.finish_reason for event in self.events if event.finish_reason is not None]


def run_scenario(scenario: Scenario, trace: Trace | None = None) -> Report:
    """Raises InvariantBroken, SimulationStuck, or whatever a part raises that it should not."""
    return run_virtually(_Simulation(scenario, trace).run(), limit_s=600.0)


class _Simulation:
    def __init__(self, scenario: Scenario, trace: Trace | None):
        self._scenario = scenario
        self._write = trace
        self._report = Report()
        self._errors: list[str] = []

    async def run(self) -> Report:
        loop = asyncio.get_running_loop()
        loop.set_exception_handler(self._on_exception)
        self._clock = loop.time
        scenario = self._scenario
        self._fabric = MemoryFabric(scenario.seed, trace=self._trace if self._write is not None else None)
        self._links = LinkFabric(bytes_per_s=scenario.link_bytes_per_s)
        self._fleet = SimFleet(scenario, self._fabric, self._links, self._trace)
        for _ in range(scenario.num_prefill):
            await self._fleet.start("prefill")
        for _ in range(scenario.num_decode):
            await self._fleet.start("decode")
        self._routers = [
            SimRouter(index, self._fleet, self._fabric, scenario.pipeline, blind_pulls=scenario.blind_pulls)
            for index in range(scenario.num_routers)
        ]
        injector = self._injector = Injector(
            scenario.faults,
            fleet=self._fleet,
            fabric=self._fabric,
            links=self._links,
            routers=self._routers,
            trace=self._trace,
        )
        faults = asyncio.create_task(injector.run(), name="faults")
        clients = [
            asyncio.create_task(self._client(arrival, self._routers[arrival.router]), name=f"client {number}")
            for number, arrival in enumerate(scenario.arrivals)
        ]
        results = await asyncio.gather(*clients, return_exceptions=True)
        await faults
        self._report.fired = dict(injector.fired)
        for result in results:
            if isinstance(result, BaseException):
                raise result
        await self._settle()
        return self._report

    async def _client(self, arrival: Arrival, router: SimRouter) -> None:
        """One client: reads its answer, or leaves in the middle."""
        await asyncio.sleep(arrival.at_s)
        if router.lost.done():
            return  # nobody listens there
        name, answer, stages = arrival.request.request_id, _Answer(), Stages(arrive=self._clock())
        reading = router.spawn(self._read(arrival, router, answer, stages))
        self._report.requests += 1
        patience_s = MOST_WAIT_S if arrival.cancel_after_s is None else arrival.cancel_after_s
        done, _ = await asyncio.wait({reading, router.lost}, timeout=patience_s, return_when=asyncio.FIRST_COMPLETED)
        if not done:
            if arrival.cancel_after_s is None:
                raise InvariantBroken(f"{name} has waited for {patience_s} s: {describe(reading)}")
            self._trace(f"{name}: the client leaves")
            reading.cancel()
            await asyncio.wait({reading, router.lost}, return_when=asyncio.FIRST_COMPLETED)
        self._report.tokens += len(answer.tokens)
        self._report.retries += stages.resumes
        self._report.prefill_failures += stages.prefill_failures
        if not reading.done():
            self._report.orphaned += 1
            reading.cancel()  # to be seen to its end when the router is
        self._check_answer(arrival, answer, reading)
        self._check_computed_once(arrival, stages)

    def _check_answer(self, arrival: Arrival, answer: _Answer, reading: "asyncio.Task[None]") -> None:
        name, tokens = arrival.request.request_id, answer.tokens
        error = reading.exception() if reading.done() and not reading.cancelled() else None
        if arrival.is_poison:
            if not isinstance(error, TwostrokeError) or tokens:
                raise InvariantBroken(f"{name} kills engines, and yet got {tokens}, and {error!r}")
            self._report.poisonous += 1
            return
        if error is not None:
            is_refusal = isinstance(error, RequestError) and error.status == 429 and not tokens
            num_deaths = sum(fault.kind in DEADLY_FAULTS for fault in self._scenario.faults)
            # Two routers may try their suspects on one worker at the same moment, though that is rare.
            is_poisoned = any(one.is_poison for one in self._scenario.arrivals)
            if isinstance(error, PoisonRequest) and (num_deaths > 1 or is_poisoned):
                self._report.mistaken += 1
                return
            if not (is_refusal and self._scenario.is_overload):
                raise InvariantBroken(f"{name}: failed with {error!r} after {len(tokens)} tokens") from error
            self._report.refused += 1
            return
        expected = expected_tokens(arrival.request, self._scenario.num_layers)
        if not reading.done() or reading.cancelled():
            self._report.cancelled += reading.done()
            if tokens != expected[: len(tokens)]:
                raise InvariantBroken(f"{name}: {tokens} came before the client left, expected {expected}")
            return
        self._report.finished += 1
        if tokens != expected:
            raise InvariantBroken(f"{name}: got {tokens}, expected {expected}")
        stopped = expected[-1] in arrival.request.stop_token_ids and len(expected) > arrival.request.min_tokens
        if answer.ends != ["stop" if stopped else "length"] or answer.events[-1].finish_reason is None:
            raise InvariantBroken(f"{name}: ends {answer.ends} in {len(answer.events)} events")

    def _check_computed_once(self, arrival: Arrival, stages: Stages) -> None:
        """The decode worker computes no prompt that a prefill worker was asked for, unless something went wrong."""
        scenario = self._scenario
        is_calm = not (scenario.faults or scenario.is_overload or any(one.is_poison for one in scenario.arrivals))
        if is_calm and any(tried.prefill is not None and tried.transfer_s == 0.0 for tried in stages.tries):
            raise InvariantBroken(f"{arrival.request.request_id}: its prompt was computed twice")

    async def _read(self, arrival: Arrival, router: SimRouter, answer: _Answer, stages: Stages) -> None:
        next_index = 0
        async with aclosing(router.pipeline.generate(arrival.request, stages)) as events:
            async for event in events:
                self._trace(f"{arrival.request.request_id} gets {event}")
                if event.index != next_index or event.error is not None:
                    raise InvariantBroken(f"{arrival.request.request_id}: {event} in place of token {next_index}")
                next_index += len(event.tokens)
                answer.events.append(event)

    async def _settle(self) -> None:
        """Everything has been answered: soon nobody must hold anything any more."""
        await self._settle_routers()
        for _ in range(2):  # a router's word for a worker that is quiet already may be under way
            for process in list(self._fleet.processes.values()):
                try:
                    async with asyncio.timeout(30.0):
                        await process.worker.drain()
                except TimeoutError as error:
                    raise InvariantBroken(f"{process.host} does not become idle: {process.worker.stats()}") from error
            await asyncio.sleep(0.1)
        await self._fleet.close()
        for process in self._fleet.processes.values():
            self._check_idle(process)
        await self._check_known_blocks()
        for router in self._routers:
            await router.close()
        for process in list(self._fleet.processes.values()):
            await self._fleet.end(process)
        processes = (*self._fleet.processes.values(), *self._fleet.departed)
        for process in processes:
            self._check_ended(process)
        if (num_poisoned := sum(process.engine.was_poisoned for process in processes)) > MOST_POISONED:
            raise InvariantBroken(f"{num_poisoned} engines died of one request")
        self._report.third_deaths += num_poisoned == 3
        await asyncio.sleep(1.0)  # closing messages are still under way
        tasks = asyncio.all_tasks() - {asyncio.current_task()}
        if tasks:
            raise InvariantBroken("tasks are left: " + "; ".join(describe(task) for task in tasks))
        if self._fleet.num_calls or self._fabric.connections or self._fabric.listeners or self._links.pending:
            raise InvariantBroken(
                f"left: {self._fleet.num_calls} calls, {len(self._fabric.connections)} connections, "
                f"{len(self._fabric.listeners)} listeners, {len(self._links.pending)} links"
            )
        if errors := [*self._errors, *self._injector.violations]:
            raise InvariantBroken("; ".join(errors))
        self._report.virtual_s = self._clock()

    async def _settle_routers(self) -> None:
        for router in self._routers:
            if router.lost.done():
                for process in self._fleet.processes.values():
                    self._fabric.end_silence(router.host, process.host)
                virtual_loop().continue_process(router.host)
                await router.ended()
            if self._scenario.is_overload and not self._scenario.faults and (ejected := router.pipeline.ejected()):
                raise InvariantBroken(
                    f"{router.host} has ejected {ejected}, which only refused what they had no room for"
                )
            if router.pipeline.in_flight:
                raise InvariantBroken(f"{router.host} counts {router.pipeline.in_flight} calls after all have ended")

    async def _check_known_blocks(self) -> None:
        """When all is quiet, routers that have a channel to a worker know exactly what its cache holds.

        Who has missed the very last change can't know yet.
        """
        pairs = [(router, process) for router in self._routers for process in self._fleet.processes.values()]
        pairs = [(router, process) for router, process in pairs if router.channels.is_connected(process.info.peer)]
        await asyncio.sleep(0.5)  # news may be under way
        for router, process in pairs:
            if (process.host, router.host) in self._injector.behind:
                continue
            known = router.known_blocks(process.info.peer)
            held = {short_name(name) for name in process.pool.names(0, process.pool.num_blocks)}
            if known is not None and known != held:
                raise InvariantBroken(
                    f"{router.host} knows {len(known)} blocks of {process.host}, which holds {len(held)}; "
                    f"{len(known & held)} are the same"
                )

    def _check_idle(self, process: SimProcess) -> None:
        process.pool.check_integrity()
        stats = process.worker.stats()
        busy = stats.num_waiting, stats.num_running, stats.num_waiting_tokens, stats.num_transfers
        if process.pool.owned_blocks or any(busy):
            raise InvariantBroken(f"{process.host} is not idle: {stats}")
        if stats.free_blocks != stats.total_blocks:
            raise InvariantBroken(f"{process.host} lost blocks: {stats}")
        receiver = process.parts.receiver
        if receiver is not None:
            offers = [pending for lanes in receiver._offers.values() for pending in lanes.values()]
            if receiver._kept or not all(pending.deadline.runs for pending in offers):
                raise InvariantBroken(f"{process.host} keeps offers for requests that have ended")

    def _check_ended(self, process: SimProcess) -> None:
        process.pool.check_integrity()
        if process.pool.owned_blocks:
            raise InvariantBroken(f"{process.pool.owned_blocks} blocks of {process.host} outlive it")
        if process.worker.stats().swapped_blocks:
            raise InvariantBroken(f"{process.host} leaves swapped KV behind: {process.worker.stats()}")
        if violations := [*process.store.violations, *process.violations]:
            raise InvariantBroken(f"{process.host}: " + "; ".join(violations))
        self._report.count(process.info.role, process.worker.stats())
        self._report.steps_ahead += process.engine.num_steps_ahead

    def _trace(self, line: str) -> None:
        if self._write is not None:
            self._write(f"{self._clock():12.6f} {line}")

    def _on_exception(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        self._errors.append(f"{context.get('message')}: {context.get('exception')!r}")


def quiet_logs() -> None:
    """Warnings of aborted transfers and lost routers are what a simulation is made of."""
    logging.getLogger("twostroke").setLevel(logging.CRITICAL)
