"""The simulation is worth something: with one safeguard switched off, it goes red within a few hundred seeds.

Those of KV transfer itself: ../transfers/test_lifecycle_safeguards.py. Those of overload: ../policies/test_policies.py.
"""

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from itertools import chain, islice
from types import ModuleType
from typing import Any, TypeVar

import pytest
from msgspec.structs import replace

from tests.simulation.scenarios.moving import make_moving
from tests.simulation.scenarios.run import run_scenario
from tests.simulation.scenarios.scenario import Scenario, make_scenario
from twostroke.kvtransfer.receiver import KVReceiver
from twostroke.kvtransfer.transfer import IncomingPairTransfer, OutgoingTransfer
from twostroke.model.step import BlockCopy
from twostroke.protocol.errors import RequestError, TransferFailed, TwostrokeError
from twostroke.protocol.messages import BlocksChanged, BlocksHeld, Chunk
from twostroke.protocol.requests import BlockedRequest, GenerateRequest, Peer, SampledToken, Ticket, TokenEvent
from twostroke.router.generate import attempt
from twostroke.router.generate.attempt import Attempt
from twostroke.router.generate.moves import RunningStream, StreamMoves
from twostroke.router.generate.pipeline import Pipeline
from twostroke.router.request_state import RequestState, SuspectRequest
from twostroke.router.routing.block_index import BlockIndex
from twostroke.router.worker_health import Suspects, WorkerRecords
from twostroke.worker.scheduling.block_pool import BlockPool
from twostroke.worker.scheduling.job import SequenceState, WorkerJob
from twostroke.worker.scheduling.scheduler import Scheduler, Swap, Swapping
from twostroke.worker.step_loop import StepLoop
from twostroke.worker.token_server import TokenServer

MOST_SEEDS = 4000
MOST_RUNS = 400


Replacement = TypeVar("Replacement", bound=Callable[..., Any])


@dataclass(frozen=True)
class Sabotage:
    """One safeguard switched off: `target.name` becomes `replacement`."""

    what: str
    target: type | ModuleType
    name: str
    replacement: Callable[..., Any]
    only: str  # seeds with this fault, "any fault", "overload", "poison" or "moves"; none: seeds without faults
    seen_by: int  # the seed that is tried first, where the others take long to see it

    def is_tried_by(self, scenario: Scenario) -> bool:
        match self.only:
            case "" | "any fault" | "moves":
                return True
            case "overload":
                return scenario.is_overload and not scenario.faults
            case "poison":
                return any(arrival.is_poison for arrival in scenario.arrivals)
        return any(fault.kind == self.only for fault in scenario.faults)


SABOTAGES: list[Sabotage] = []


def sabotage(
    what: str, target: type | ModuleType, name: str, only: str = "", seen_by: int = 0
) -> Callable[[Replacement], Replacement]:
    """The function takes the place of `target.name`; what goes wrong then, and which seeds would see it."""

    def note(replacement: Replacement) -> Replacement:
        SABOTAGES.append(Sabotage(what, target, name, replacement, only, seen_by))
        return replacement

    return note


@sabotage("chunks go to the table's start", IncomingPairTransfer, "begin_chunk")
def _ignore_first_unit(rank_pair: IncomingPairTransfer, chunk: Chunk) -> Any:
    return _begin_chunk(rank_pair, replace(chunk, runs=tuple(replace(run, first_unit=0) for run in chunk.runs)))


@sabotage("blocks are freed before the transfer into them is cancelled", Scheduler, "_release_if_unused")
def _release_while_receiving(scheduler: Scheduler, job: WorkerJob) -> None:
    if job.has_ended and not (job.under_way or job.is_sending):
        job.sequence.reset(scheduler.pool)


@sabotage("blocks are freed while a step writes into them", Scheduler, "_release_if_unused")
def _release_in_the_middle_of_a_step(scheduler: Scheduler, job: WorkerJob) -> None:
    if job.has_ended and not (job.is_receiving or job.is_sending):
        job.sequence.reset(scheduler.pool)


@sabotage("blocks are freed while a step ahead will write into them", Scheduler, "_release_if_unused")
def _release_before_a_step_ahead_has_ended(scheduler: Scheduler, job: WorkerJob) -> None:
    if job.has_ended and len(job.under_way) < 2 and not (job.is_receiving or job.is_sending):
        job.sequence.reset(scheduler.pool)


@sabotage("blocks are freed before they are copied out", Scheduler, "_send_back")
def _release_before_the_copy(scheduler: Scheduler, job: WorkerJob) -> None:
    is_copying, job.is_copying = job.is_copying, False
    _send_back(scheduler, job)
    job.is_copying = is_copying


@sabotage("a prefix that did not come is taken for one that did", Scheduler, "pull_failed", "part_transfers", 440)
def _believe_in_a_failed_pull(scheduler: Scheduler, job: WorkerJob) -> None:
    scheduler.pulled(job)


@sabotage("KV comes back to other blocks", Swapping, "swap_in")
def _bring_back_to_the_beginning(swapping: Swapping, job: WorkerJob, pool: BlockPool) -> Swap | None:
    swap = _swap_in(swapping, job, pool)
    if swap is None:
        return None
    blocks = tuple(job.sequence.block_ids[: len(swap.copy.cache_blocks)])
    return Swap(job, BlockCopy(False, blocks, swap.copy.host_blocks))


@sabotage("host blocks are never freed", Swapping, "release")
def _never_give_host_blocks_back(swapping: Swapping, job: WorkerJob) -> None:
    """Nor those of requests that have ended."""


@sabotage("steps run ahead of what they must know", Scheduler, "_may_run_ahead")
def _never_wait_to_run_ahead(scheduler: Scheduler, in_flight: Any, decodes: Sequence[WorkerJob]) -> bool:
    return True


@sabotage("blocks are freed while they are being sent", Scheduler, "_release_if_unused")
def _release_while_sending(scheduler: Scheduler, job: WorkerJob) -> None:
    if job.has_ended and not (job.under_way or job.is_receiving or job.is_copying):
        job.sequence.reset(scheduler.pool)


@sabotage("blocks are named too early", SequenceState, "_publish_full_blocks")
def _publish_what_is_not_computed(sequence: SequenceState, pool: BlockPool) -> None:
    computed, sequence.num_computed = sequence.num_computed, len(sequence.block_ids) * sequence.block_size
    sequence.num_computed = min(sequence.num_computed, len(sequence.token_ids))
    _publish(sequence, pool)
    sequence.num_computed = computed


@sabotage("offers are kept for requests that have ended", KVReceiver, "refuse_offer", seen_by=81)
def _keep_offers_for_ever(receiver: KVReceiver, ticket: Ticket) -> None:
    is_kept = ticket.transfer_id in receiver._kept
    _refuse(receiver, ticket)
    if is_kept:
        receiver._kept.add(ticket.transfer_id)


@sabotage("some blocks are never freed", Scheduler, "_release_if_unused")
def _forget_to_release(scheduler: Scheduler, job: WorkerJob) -> None:
    if job.has_ended and job.request.request_id.endswith("3"):
        return
    _release_decode(scheduler, job)


@sabotage("sent blocks are not waited for", OutgoingTransfer, "done")
async def _call_a_transfer_done_at_once(transfer: OutgoingTransfer) -> None:
    raise TransferFailed("not waited for")


@sabotage("routers don't hear of KV that was not sent", TokenServer, "kv_not_sent", "any fault", 19)
def _tell_nobody(server: TokenServer, router_id: str, request_id: str) -> None:
    """The decode worker waits for an offer that will not come."""


@sabotage("silent routers keep their leases", TokenServer, "_watch", "lose_router")
async def _wait_for_ever(*_: Any) -> None:
    """Nobody is silent for too long."""


@sabotage("tokens are taken twice", attempt, "join_fresh")
def _take_every_index(events: Sequence[TokenEvent], sent: Sequence[int]) -> TokenEvent | None:
    tokens: tuple[SampledToken, ...] = tuple(token for event in events for token in event.tokens)
    return TokenEvent(events[0].request_id, len(sent), tokens, events[-1].finish_reason)


@sabotage("a resumed request forgets what was sent", Pipeline, "_attempt_request", "kill_decode")
def _call_what_was_sent_a_prompt(pipeline: Pipeline, state: RequestState) -> GenerateRequest:
    tried = _attempt_request(pipeline, state)
    return replace(tried, num_prompt_tokens=len(tried.token_ids))


@sabotage("nobody is accused of workers' deaths", Suspects, "killed_by", "poison")
def _accuse_nobody(suspects: Suspects, suspect: SuspectRequest) -> tuple[Peer, ...]:
    return ()


@sabotage("the guilty may try again", Suspects, "check", "poison")
def _forget_the_guilty(suspects: Suspects, suspect: SuspectRequest) -> None:
    """They may try again, at other workers."""


@sabotage("each router blocks requests for itself", TokenServer, "_pass_on", "poison")
def _pass_nothing_on(server: TokenServer, blocked: Sequence[BlockedRequest], *, but_to: str) -> None:
    """Other routers find out by themselves."""


@sabotage("draining workers take requests", StepLoop, "check_takes_requests", "drain_decode", 2007)
def _take_all_requests(life: StepLoop) -> None:
    """Those that come while it drains, too."""


@sabotage("who gives way keeps its blocks", Scheduler, "_send_back")
def _send_back_with_blocks(scheduler: Scheduler, job: WorkerJob) -> None:
    job.is_copying, is_copying = True, job.is_copying
    _send_back(scheduler, job)
    job.is_copying = is_copying


@sabotage("missed news of blocks are not asked for", BlockIndex, "heard", "lose_block_news")
def _overlook_gaps(index: BlockIndex, worker: Peer, message: BlocksHeld | BlocksChanged) -> bool:
    known = index._known(worker)
    if isinstance(message, BlocksChanged) and known.sequence is not None:
        message = replace(message, sequence=known.sequence + 1)
    return _heard(index, worker, message)


@sabotage("decode workers don't hear of failed prefills", Attempt, "_take_over_prefill", "refuse_prefill")
async def _never_take_over_prefill(attempt: Attempt) -> None:
    """The decode worker waits for KV that will not come."""


@sabotage("decode workers compute at once what may have killed another", Scheduler, "wait_on", "poison")
def _compute_at_once(scheduler: Scheduler, job: WorkerJob) -> None:
    """Compute at once what the prefill worker has died of."""


@sabotage("lost routers' requests go on", TokenServer, "_drop", "lose_router")
def _drop_silently(server: TokenServer, router_id: str, connection: Any) -> None:
    server._routers.pop(router_id, None)


@sabotage("refusals count as a worker's failures", WorkerRecords, "_failed", "overload")
def _hold_refusals_against_workers(
    records: WorkerRecords, suspect: SuspectRequest, worker: Peer, error: TwostrokeError
) -> None:
    _failed(records, suspect, worker, error)
    if isinstance(error, RequestError):
        records._ejection.failed(worker)


@sabotage("streams move as often as they like", StreamMoves, "_may_move", "moves")
def _always_move(moves: StreamMoves, stream: RunningStream, reason: str, now: float) -> bool:
    return stream.move is None and bool(stream.sent)


@sabotage("nobody counts a stream's moves", RunningStream, "__init__", "moves")
def _forget_moves(stream: RunningStream, *args: Any, num_moves: int) -> None:
    _begin_stream(stream, *args, num_moves=0)


@sabotage("moves outlive their streams", StreamMoves, "running", "moves", 228)
@asynccontextmanager
async def _never_give_a_move_up(moves: StreamMoves, stream: RunningStream) -> AsyncIterator[None]:
    async with _running(moves, stream):
        try:
            yield
        finally:
            stream.move = None


@sabotage("a stream that has moved is written on where it was", Attempt, "_call_decode", "moves")
async def _never_end_the_call(attempt: Attempt) -> None:
    await asyncio.shield(asyncio.ensure_future(_call_decode(attempt)))


@sabotage("a moved stream forgets what was sent", Pipeline, "_attempt_request", "moves")
def _begin_anew(pipeline: Pipeline, state: RequestState) -> GenerateRequest:
    return _call_what_was_sent_a_prompt(pipeline, state)


_begin_stream = RunningStream.__init__
_running = StreamMoves.running
_call_decode = Attempt._call_decode
_failed = WorkerRecords._failed
_attempt_request = Pipeline._attempt_request
_heard = BlockIndex.heard
_begin_chunk = IncomingPairTransfer.begin_chunk
_refuse = KVReceiver.refuse_offer
_publish = SequenceState._publish_full_blocks
_send_back = Scheduler._send_back
_swap_in = Swapping.swap_in
_release_decode = Scheduler._release_if_unused


@pytest.mark.parametrize("sabotage", SABOTAGES, ids=lambda sabotage: sabotage.what)
def test_the_simulation_goes_red_when(sabotage: Sabotage, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(sabotage.target, sabotage.name, sabotage.replacement)
    seeds = chain([sabotage.seen_by], range(MOST_SEEDS))
    if sabotage.only == "moves":
        scenarios = (make_moving(seed, with_faults=False) for seed in seeds)
    else:
        scenarios = (make_scenario(seed, with_faults=bool(sabotage.only)) for seed in seeds)
    for scenario in islice(filter(sabotage.is_tried_by, scenarios), MOST_RUNS):
        try:
            run_scenario(scenario)
        except Exception as error:
            print(f"seed {scenario.seed}: {type(error).__name__}: {error}")
            return
    pytest.fail(f"no seed noticed that {sabotage.what}")
