"""The simulation is worth something: with one safeguard switched off, it goes red within a few hundred seeds."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
from msgspec.structs import replace

from decode_worker.jobs import DecodeJob, DecodeStep, Swap
from decode_worker.scheduler import DecodeScheduler
from decode_worker.swapped_blocks import SwappedBlocks
from kvtransfer.incoming_lane import IncomingLane
from kvtransfer.outgoing import OutgoingTransfer
from model.block_pool import BlockPool
from model.sequence import SequenceState
from model.step import BlockCopy
from prefill_worker.scheduler import PrefillJob, PrefillScheduler
from protocol.errors import TransferFailed
from protocol.messages import Chunk
from protocol.token_server import TokenServer
from tests.simulation.run import run_scenario
from tests.simulation.scenario import make_scenario

MOST_SEEDS = 400


@dataclass(frozen=True)
class Sabotage:
    """One safeguard switched off: `target.name` becomes `replacement`."""

    what: str
    target: type
    name: str
    replacement: Callable[..., Any]
    with_faults: bool = False


def _believe_every_digest(lane: IncomingLane, chunk: Chunk, *, is_intact: bool) -> Any:
    return _end_chunk(lane, chunk, is_intact=True)


def _ignore_first_unit(lane: IncomingLane, chunk: Chunk) -> Any:
    return _begin_chunk(lane, replace(chunk, runs=tuple(replace(run, first_unit=0) for run in chunk.runs)))


def _release_while_receiving(scheduler: DecodeScheduler, job: DecodeJob) -> None:
    if job.has_ended and not job.under_way:
        job.sequence.reset(scheduler._pool)


def _release_in_the_middle_of_a_step(scheduler: DecodeScheduler, job: DecodeJob) -> None:
    if job.has_ended and not job.is_receiving:
        job.sequence.reset(scheduler._pool)


def _release_before_a_step_ahead_has_ended(scheduler: DecodeScheduler, job: DecodeJob) -> None:
    if job.has_ended and len(job.under_way) < 2 and not job.is_receiving:
        job.sequence.reset(scheduler._pool)


def _release_before_the_copy(scheduler: DecodeScheduler, job: DecodeJob) -> None:
    is_copying, job.is_copying = job.is_copying, False
    _send_back(scheduler, job)
    job.is_copying = is_copying


def _bring_back_to_the_beginning(swapped: SwappedBlocks, job: DecodeJob) -> Swap | None:
    swap = _swap_in(swapped, job)
    if swap is None:
        return None
    blocks = tuple(job.sequence.block_ids[: len(swap.copy.cache_blocks)])
    return Swap(job, BlockCopy(False, blocks, swap.copy.host_blocks))


def _never_give_host_blocks_back(swapped: SwappedBlocks, job: DecodeJob) -> None:
    """Nor those of requests that have ended."""


def _never_wait_to_run_ahead(scheduler: DecodeScheduler, in_flight: DecodeStep, decodes: Sequence[DecodeJob]) -> bool:
    return True


def _release_while_sending(scheduler: PrefillScheduler, job: PrefillJob) -> None:
    if job.has_ended and not job.in_step:
        job.sequence.reset(scheduler._pool)


def _publish_what_is_not_computed(sequence: SequenceState, pool: BlockPool) -> None:
    computed, sequence.num_computed = sequence.num_computed, len(sequence.block_ids) * sequence.block_size
    sequence.num_computed = min(sequence.num_computed, len(sequence.token_ids))
    _publish(sequence, pool)
    sequence.num_computed = computed


def _forget_to_release(scheduler: DecodeScheduler, job: DecodeJob) -> None:
    if job.has_ended and job.request.request_id.endswith("3"):
        return
    _release_decode(scheduler, job)


async def _call_a_transfer_done_at_once(transfer: OutgoingTransfer) -> None:
    raise TransferFailed("not waited for")


def _tell_nobody(server: TokenServer, router_id: str, request_id: str) -> None:
    """The decode worker waits for an offer that will not come."""


_end_chunk = IncomingLane.end_chunk
_begin_chunk = IncomingLane.begin_chunk
_publish = SequenceState.publish_full_blocks
_send_back = DecodeScheduler._send_back
_swap_in = SwappedBlocks.swap_in
_release_decode = DecodeScheduler._release_if_unused

SABOTAGES = [
    Sabotage("digests are not checked", IncomingLane, "end_chunk", _believe_every_digest, with_faults=True),
    Sabotage("chunks go to the table's start", IncomingLane, "begin_chunk", _ignore_first_unit),
    Sabotage(
        "blocks are freed before the transfer into them is cancelled",
        DecodeScheduler,
        "_release_if_unused",
        _release_while_receiving,
    ),
    Sabotage(
        "blocks are freed while a step writes into them",
        DecodeScheduler,
        "_release_if_unused",
        _release_in_the_middle_of_a_step,
    ),
    Sabotage(
        "blocks are freed while a step ahead will write into them",
        DecodeScheduler,
        "_release_if_unused",
        _release_before_a_step_ahead_has_ended,
    ),
    Sabotage("steps run ahead of what they must know", DecodeScheduler, "_can_run_ahead", _never_wait_to_run_ahead),
    Sabotage("blocks are freed before they are copied out", DecodeScheduler, "_send_back", _release_before_the_copy),
    Sabotage("KV comes back to other blocks", SwappedBlocks, "swap_in", _bring_back_to_the_beginning),
    Sabotage("host blocks are never freed", SwappedBlocks, "release", _never_give_host_blocks_back),
    Sabotage(
        "blocks are freed while they are being sent", PrefillScheduler, "_release_if_unused", _release_while_sending
    ),
    Sabotage("sent blocks are not waited for", OutgoingTransfer, "done", _call_a_transfer_done_at_once),
    Sabotage("blocks are named too early", SequenceState, "publish_full_blocks", _publish_what_is_not_computed),
    Sabotage("routers don't hear of KV that was not sent", TokenServer, "kv_not_sent", _tell_nobody, with_faults=True),
    Sabotage("some blocks are never freed", DecodeScheduler, "_release_if_unused", _forget_to_release),
]


@pytest.mark.parametrize("sabotage", SABOTAGES, ids=lambda sabotage: sabotage.what)
def test_the_simulation_goes_red_when(sabotage: Sabotage, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(sabotage.target, sabotage.name, sabotage.replacement)
    for seed in range(MOST_SEEDS):
        try:
            run_scenario(make_scenario(seed, with_faults=sabotage.with_faults))
        except Exception as error:
            print(f"seed {seed}: {type(error).__name__}: {error}")
            return
    pytest.fail(f"{MOST_SEEDS} seeds did not notice that {sabotage.what}")
