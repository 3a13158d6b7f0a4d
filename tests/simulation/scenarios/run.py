"""Runs a scenario: real routers' pipelines and token channels, real workers, real KV transfer, in one process.

What must hold, whatever the seed: each client gets exactly the oracle's tokens (those before it left), each index once
and in order, and one end, soon; where nothing goes wrong, no prompt is computed twice; the blocks of a lost router's
requests are free within a lease; afterwards no worker owns a block, no call, connection or task is left. No answer is
written at two workers at once, and streams move as often as they may (blind_router.py). Only these requests may fail:
in an overload with status 429, before the first token; those that kill engines, of which they get two at most; and,
taken for such, one that two other faults have met on two workers in a row.
"""

import asyncio
from collections import Counter
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any

from tests.simulation.blind_router import BlindRouter
from tests.simulation.fake_model import FakeEngine, expected_tokens
from tests.simulation.replay import Counts
from tests.simulation.scenarios.injector import Injector
from tests.simulation.scenarios.moving import make_moving
from tests.simulation.scenarios.scenario import DEADLY_FAULTS, Arrival, Scenario, make_scenario
from tests.simulation.scenarios.tiered import make_tiered
from twostroke.protocol.block_hash import short_name
from twostroke.protocol.errors import RequestError, TwostrokeError
from twostroke.protocol.requests import LogContext, TokenEvent
from twostroke.protocol.stats import Role, WorkerStats
from twostroke.router.request_state import ChoiceJob, RequestState
from twostroke.router.worker_health import PoisonRequest
from twostroke.simulator.memory_network import MemoryFabric, Trace
from twostroke.simulator.memory_store import FakeStore, FakeSwapSpace
from twostroke.simulator.memory_transport import LinkFabric
from twostroke.simulator.sim_fleet import SimFleet, SimProcess
from twostroke.simulator.virtual_loop import describe, run_virtually, virtual_loop


@dataclass
class Report(Counts):
    """Counts of what scenarios did."""

    requests: int = 0
    finished: int = 0
    cancelled: int = 0
    refused: int = 0  # with 429, in an overload
    poisonous: int = 0  # that killed engines, and failed
    mistaken: int = 0  # for poisonous, having met two faults in a row
    orphaned: int = 0  # whose router was lost
    tokens: int = 0
    retries: int = 0
    prefill_failures: int = 0
    fired: Counter[str] = field(default_factory=Counter)  # faults that hit something, by kind
    preemptions: int = 0
    swaps: int = 0
    prefix_hits: int = 0
    transfers_done: int = 0
    transfers_failed: int = 0
    digest_failures: int = 0
    links_lost: int = 0
    pulled_tokens: int = 0
    pulled_by_decode: int = 0  # of them, by decode workers alone
    steps: int = 0
    steps_ahead: int = 0
    moved: int = 0  # streams, to another worker
    not_moved: int = 0  # since the first part of the move failed
    reasons: Counter[str] = field(default_factory=Counter)  # of moves that were begun
    tier_hit_tokens: int = 0
    tier_objects: int = 0  # written
    tier_quarantined: int = 0
    tier_errors: int = 0
    copied: int = 0  # ends of prompts, from another's block
    virtual_s: float = 0.0
    longest_wait_s: float = 0.0  # of a client for its first or its next tokens; of several runs, summed

    def count(self, role: Role, stats: WorkerStats) -> None:
        """Add a worker's own counters."""
        self.preemptions += stats.preemptions
        self.swaps += stats.swaps
        self.prefix_hits += stats.prefix_hits
        self.transfers_done += stats.transfers_done
        self.transfers_failed += stats.transfers_failed
        self.digest_failures += stats.transfer_digest_failures
        self.links_lost += stats.transfer_links_lost
        self.pulled_tokens += stats.pulled_tokens
        self.pulled_by_decode += stats.pulled_tokens if role == "decode" else 0
        self.steps += stats.steps
        for tier in stats.tiers:
            self.tier_hit_tokens += tier.hit_tokens
            self.tier_objects += tier.written_objects
            self.tier_quarantined += tier.quarantined
            self.tier_errors += tier.errors


MOST_WAIT_S = 45.0
"""Nobody waits longer for an answer, faults included: the longest of those lasts 15 s."""
MOST_POISONED = 2
"""Engines that requests which kill them may have, over all their repetitions."""


@dataclass
class _Answer:
    """Answer that a client has received."""

    events: list[TokenEvent] = field(default_factory=list)

    @property
    def tokens(self) -> list[int]:
        return [token.token_id for event in self.events for token in event.tokens]

    @property
    def ends(self) -> list[str]:
        return [event.finish_reason for event in self.events if event.finish_reason is not None]


def run_scenario(scenario: Scenario, trace: Trace | None = None) -> Report:
    """Raises AssertionError where something does not hold, SimulationStuck, or what a part raises and should not."""
    return run_virtually(_Simulation(scenario, trace).run(), limit_s=600.0)


MAKERS = {"plain": make_scenario, "moves": make_moving, "tiers": make_tiered}


def run_seed(seed: int, trace: Trace | None = None, *, with_faults: bool = False, kind: str = "plain") -> Report:
    """The same for a seed's scenario of a kind."""
    return run_scenario(MAKERS[kind](seed, with_faults=with_faults), trace)


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
        self._trace(str(scenario))
        self._fabric = MemoryFabric(scenario.seed, trace=self._trace if self._write is not None else None)
        self._links = LinkFabric(bytes_per_s=scenario.link_bytes_per_s)
        self._fleet = SimFleet(scenario, self._engine, self._fabric, self._links, self._trace)
        for _ in range(scenario.num_prefill):
            await self._fleet.start("prefill")
        for _ in range(scenario.num_decode):
            await self._fleet.start("decode")
        self._routers = [
            BlindRouter(index, self._fleet, self._fabric, scenario.pipeline, blind_pulls=scenario.blind_pulls)
            for index in range(scenario.num_routers)
        ]
        injector = self._injector = Injector(
            scenario.faults, self._fleet, self._fabric, self._links, self._routers, self._trace
        )
        faults = asyncio.create_task(injector.run(), name="faults")
        clients = [
            asyncio.create_task(self._client(arrival, self._routers[arrival.router]), name=f"client {number}")
            for number, arrival in enumerate(scenario.arrivals)
        ]
        results = await asyncio.gather(*clients, return_exceptions=True)
        await faults
        self._report.fired = injector.fired
        for result in results:
            if isinstance(result, BaseException):
                raise result
        await self._settle()
        return self._report

    def _engine(self, role: Role, store: FakeStore, swap_space: FakeSwapSpace | None) -> FakeEngine:
        return FakeEngine(store, swap_space, step_s=self._scenario.step_s)

    async def _client(self, arrival: Arrival, router: BlindRouter) -> None:
        """One client: reads its answer, or leaves in the middle."""
        await asyncio.sleep(arrival.at_s)
        if router.lost.done():
            return  # nobody listens there
        name, answer = arrival.request.request_id, _Answer()
        state = RequestState(ChoiceJob(arrival.request), self._clock(), LogContext(name))
        reading = router.spawn(self._read(arrival, router, answer, state))
        self._report.requests += 1
        patience_s = MOST_WAIT_S if arrival.cancel_after_s is None else arrival.cancel_after_s
        done, _ = await asyncio.wait({reading, router.lost}, timeout=patience_s, return_when=asyncio.FIRST_COMPLETED)
        if not done:
            assert arrival.cancel_after_s is not None, f"{name} has waited for {patience_s} s: {describe(reading)}"
            self._trace(f"{name}: the client leaves")
            reading.cancel()
            await asyncio.wait({reading, router.lost}, return_when=asyncio.FIRST_COMPLETED)
        self._report.tokens += len(answer.tokens)
        self._report.retries += state.resumes
        self._report.prefill_failures += state.prefill_failures
        if not reading.done():
            self._report.orphaned += 1
            reading.cancel()  # to be seen to its end when the router is
        self._check_answer(arrival, answer, reading)
        self._check_computed_once(arrival, state)

    def _check_answer(self, arrival: Arrival, answer: _Answer, reading: "asyncio.Task[None]") -> None:
        name, tokens = arrival.request.request_id, answer.tokens
        error = reading.exception() if reading.done() and not reading.cancelled() else None
        if arrival.is_poison:
            assert isinstance(error, TwostrokeError), f"{name} kills engines, and yet got {error!r}"
            assert not tokens, f"{name} kills engines, and yet got {tokens}"
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
            is_rightly_so = is_refusal and self._scenario.is_overload
            assert is_rightly_so, f"{name}: failed with {error!r} after {len(tokens)} tokens"
            self._report.refused += 1
            return
        expected = expected_tokens(arrival.request, self._scenario.windows)
        if not reading.done() or reading.cancelled():
            self._report.cancelled += reading.done()
            assert tokens == expected[: len(tokens)], f"{name}: {tokens} before the client left, expected {expected}"
            return
        self._report.finished += 1
        assert tokens == expected, f"{name}: got {tokens}, expected {expected}"
        stopped = expected[-1] in arrival.request.stop_token_ids and len(expected) > arrival.request.min_tokens
        assert answer.ends == ["stop" if stopped else "length"], f"{name}: ends {answer.ends}"
        assert answer.events[-1].finish_reason is not None, f"{name}: goes on after its end"

    def _check_computed_once(self, arrival: Arrival, state: RequestState) -> None:
        """The decode worker computes no prompt that a prefill worker was asked for, unless something went wrong."""
        scenario = self._scenario
        is_calm = not (scenario.faults or scenario.is_overload or any(one.is_poison for one in scenario.arrivals))
        was_twice = any(tried.path.prefill and tried.transfer_s == 0.0 for tried in state.attempts)
        assert not (is_calm and was_twice), f"{arrival.request.request_id}: its prompt was computed twice"

    async def _read(self, arrival: Arrival, router: BlindRouter, answer: _Answer, state: RequestState) -> None:
        next_index, last_at = 0, self._clock()
        async with aclosing(router.pipeline.generate(state)) as events:
            async for event in events:
                self._trace(f"{arrival.request.request_id} gets {event}")
                is_next = event.index == next_index and event.error is None
                assert is_next, f"{arrival.request.request_id}: {event} in place of token {next_index}"
                next_index += len(event.tokens)
                last_at, wait_s = self._clock(), self._clock() - last_at
                self._report.longest_wait_s = max(self._report.longest_wait_s, wait_s)
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
                    raise AssertionError(f"{process.host} does not become idle: {process.worker.stats()}") from error
            await asyncio.sleep(0.1)
        await self._fleet.close()
        for process in self._fleet.processes.values():
            self._check_idle(process)
            await self._check_tiers(process)
        await self._check_known_blocks()
        for router in self._routers:
            await router.close()
        for process in list(self._fleet.processes.values()):
            await self._fleet.end(process)
        processes = (*self._fleet.processes.values(), *self._fleet.departed)
        for process in processes:
            self._check_ended(process)
        num_poisoned = sum(process.engine.was_poisoned for process in processes)
        assert num_poisoned <= MOST_POISONED, f"{num_poisoned} engines died of one request"
        await asyncio.sleep(1.0)  # closing messages are still under way
        tasks = asyncio.all_tasks() - {asyncio.current_task()}
        assert not tasks, "tasks are left: " + "; ".join(describe(task) for task in tasks)
        assert not self._fleet.num_calls, f"{self._fleet.num_calls} calls are left"
        for left in (self._fabric.connections, self._fabric.listeners, self._links.pending):
            assert not left, f"{len(left)} are left of {left}"
        for router in self._routers:
            self._errors += router.violations
            self._report.reasons += router.reasons
            self._report.moved += router.pipeline.moves.num_moved.total()
            self._report.not_moved += router.pipeline.moves.num_failed.total()
        errors = [*self._errors, *self._injector.violations]
        assert not errors, "; ".join(errors)
        self._report.virtual_s = self._clock()

    async def _settle_routers(self) -> None:
        for router in self._routers:
            if router.lost.done():
                for process in self._fleet.processes.values():
                    self._fabric.end_silence(router.host, process.host)
                virtual_loop().continue_process(router.host)
                await router.ended()
            is_only_overload = self._scenario.is_overload and not self._scenario.faults
            holds_nothing = router.pipeline._records._ejection.is_empty
            assert holds_nothing or not is_only_overload, (
                f"{router.host} holds refusals for want of room against workers"
            )
            in_flight = router.pipeline.in_flight
            assert not in_flight, f"{router.host} counts {in_flight} calls after all have ended"

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
            assert known is None or known == held, (
                f"{router.host} knows {len(known)} blocks of {process.host}, which holds {len(held)}; "
                f"{len(known & held)} are the same"
            )

    def _check_idle(self, process: SimProcess) -> None:
        process.pool.check_integrity()
        stats = process.worker.stats()
        busy = stats.num_waiting, stats.num_running, stats.num_waiting_tokens, stats.num_transfers
        assert not process.pool.owned_blocks, f"{process.host} is not idle: {stats}"
        assert not any(busy), f"{process.host} is not idle: {stats}"
        assert stats.free_blocks == stats.total_blocks, f"{process.host} lost blocks: {stats}"
        receiver = process.parts.receiver
        offers = [pending for pairs in receiver._offers.values() for pending in pairs.values()]
        keeps_some = receiver._kept or not all(pending.deadline.runs for pending in offers)
        assert not keeps_some, f"{process.host} keeps offers for requests that have ended"

    async def _check_tiers(self, process: SimProcess) -> None:
        """Wait until nothing is read or written any more; nobody holds memory of the host tier then."""
        if process.tiers is None:
            return
        tiers = process.tiers.tiers
        async with asyncio.timeout(60.0):
            while tiers.is_busy:  # noqa: ASYNC110  # nobody but tests waits for this
                await asyncio.sleep(0.1)
        tiers.host.check_integrity()

    def _check_ended(self, process: SimProcess) -> None:
        process.pool.check_integrity()
        assert not process.pool.owned_blocks, f"{process.pool.owned_blocks} blocks of {process.host} outlive it"
        stats, violations = process.worker.stats(), [*process.store.violations, *process.violations]
        assert not stats.swapped_blocks, f"{process.host} leaves swapped KV behind: {stats}"
        assert not violations, f"{process.host}: " + "; ".join(violations)
        self._report.count(process.info.role, process.worker.stats())
        self._report.steps_ahead += process.engine.num_steps_ahead
        self._report.copied += process.engine.num_copied

    def _trace(self, line: str) -> None:
        if self._write is not None:
            self._write(f"{self._clock():12.6f} {line}")

    def _on_exception(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        self._errors.append(f"{context.get('message')}: {context.get('exception')!r}")
