"""A lane's own decisions, with nobody else there: above all, when its blocks are free."""

import asyncio

from tests.rigs.kv_pair import TOKEN, D, P, lane_end
from twostroke.kvtransfer.layout import ChunkPlan
from twostroke.kvtransfer.lifecycle import ReceiverState, SenderState
from twostroke.kvtransfer.transfer import IncomingLane, IncomingTransfer, OutgoingLane, OutgoingTransfer
from twostroke.protocol.kv_layout import KVLayout, group_layers
from twostroke.protocol.messages import Chunk, Commit
from twostroke.protocol.requests import Address, Ticket
from twostroke.simulator.virtual_loop import run_virtually

TICKET = Ticket(b"t" * 16, "r", P, D, (Address("127.0.0.1", 1),))
LAYOUT = KVLayout("m", "bfloat16", num_layers=2, num_kv_heads=1, head_dim=6, block_size=4)
CUT = lane_end(LAYOUT, 0, 1, 4, "raw")
NUM_TOKENS = 16
BLOCKS = (3, 1, 4, 5)


class Ends:
    """Both sides' observers: keep what they are told."""

    def __init__(self) -> None:
        self.told: list[str] = []
        self.failures: list[str] = []
        self.num_ends = 0

    def has_work(self, lane: OutgoingLane) -> None:
        pass

    def gave_up(self, lane: OutgoingLane | IncomingLane, reason: str) -> None:
        self.told.append(reason)

    def lane_ended(self, lane: OutgoingLane | IncomingLane) -> None:
        self.num_ends += 1

    def watch(self, transfer: OutgoingTransfer | IncomingTransfer) -> None:
        """Keep what the transfer is told of its lane's failure."""
        fail = transfer.fail

        def note(reason: str) -> None:
            self.failures.append(reason)
            fail(reason)

        transfer.fail = note  # type: ignore[method-assign]


async def offered(ends: Ends, progress_s: float = 20) -> OutgoingLane:
    """Everything is ready."""
    transfer = OutgoingTransfer(
        TICKET,
        BLOCKS,
        NUM_TOKENS,
        NUM_TOKENS,
        groups=LAYOUT.groups,
        layers=range(2),
        on_ended=lambda _: None,
        clock=asyncio.get_running_loop().time,
        progress_s=progress_s,
    )
    ends.watch(transfer)
    lane = transfer.add_lane(0, range(2), ends)
    lane.offered()
    return lane


async def outgoing(ends: Ends, progress_s: float = 20) -> OutgoingLane:
    """Granted, and everything ready."""
    lane = await offered(ends, progress_s)
    lane.granted(CUT, 0)
    return lane


async def incoming(ends: Ends) -> IncomingLane:
    """Granted."""
    transfer = IncomingTransfer(
        TICKET,
        BLOCKS,
        NUM_TOKENS,
        0,
        source_ranks=(0,),
        keeper=ends,
        on_ended=lambda _: None,
        clock=asyncio.get_running_loop().time,
        progress_s=20,
    )
    ends.watch(transfer)
    lane = transfer.lanes[0]
    lane.granted(CUT)
    return lane


def begin(lane: OutgoingLane) -> Chunk:
    chunk = lane.begin_chunk(4)
    assert chunk is not None
    return chunk


async def test_a_verified_senders_blocks_are_free_once_the_last_of_its_calls_has_returned() -> None:
    ends = Ends()
    lane = await outgoing(ends)
    lane.commit(TOKEN)
    begin(lane)
    assert lane.take_commit() is None
    begin(lane)
    assert lane.take_commit() == Commit(TICKET.transfer_id, 2, TOKEN)
    assert lane.take_commit() is None
    lane.end_chunk()
    assert lane.state is SenderState.FINISHING
    lane.verified()
    lane.abort("too late")
    assert (lane.state, ends.num_ends) == (SenderState.RELEASING, 0)
    lane.end_chunk()
    assert lane.state is SenderState.RELEASED
    assert (ends.told, ends.failures, ends.num_ends) == ([], [], 1)


def test_a_target_that_says_too_late_that_its_request_waits_for_room_has_not_all_the_time_to_verify() -> None:
    async def script() -> None:
        ends = Ends()
        lane = await outgoing(ends, progress_s=2)
        lane.awaited()
        lane.commit(None)
        for _ in range(2):
            begin(lane)
            lane.end_chunk()
        assert lane.take_commit() is not None
        lane.awaited()
        await asyncio.sleep(3)
        assert ends.failures == ["the target did not verify in time"]
        lane.awaited()
        assert lane.state is SenderState.ABORTING, "it may still be reading"
        await asyncio.sleep(2)
        assert lane.state is SenderState.ABORTED

    run_virtually(script())


def test_a_given_up_senders_blocks_are_free_once_the_target_has_answered_or_had_its_time() -> None:
    async def script() -> None:
        for answers in (True, False):
            ends = Ends()
            lane = await outgoing(ends, progress_s=2)
            begin(lane)
            lane.end_chunk()
            lane.abort("the client left")
            assert (lane.state, ends.num_ends) == (SenderState.ABORTING, 0)
            if answers:
                lane.peer_aborted("heard")
            await asyncio.sleep(0 if answers else 1)
            assert lane.ended == answers
            await asyncio.sleep(2)
            assert lane.state is SenderState.ABORTED
            assert (ends.told, ends.failures, ends.num_ends) == (["the client left"], ["the client left"], 1)

    run_virtually(script())


async def test_a_given_up_senders_blocks_are_free_at_once_where_no_chunk_was_sent() -> None:
    ends = Ends()
    lane = await outgoing(ends)
    lane.abort("the client left")
    assert (lane.state, ends.num_ends) == (SenderState.ABORTED, 1)


async def test_the_targets_answer_does_not_end_a_call_that_reads_the_blocks() -> None:
    ends = Ends()
    lane = await outgoing(ends)
    begin(lane)
    lane.abort("the client left")
    lane.peer_aborted("heard")
    assert (lane.state, ends.num_ends) == (SenderState.ABORTING, 0)
    lane.end_chunk()
    assert (lane.state, ends.num_ends) == (SenderState.ABORTED, 1)


def chunks() -> list[Chunk]:
    """The two chunks of the prompt, as an outgoing lane makes them."""
    plan = ChunkPlan(groups=group_layers((0, 0)), layers=range(2), num_tokens=NUM_TOKENS, num_ready_tokens=NUM_TOKENS)
    plan.begin(4, 0)
    runs = [plan.next_runs(4), plan.next_runs(4)]
    return [Chunk(TICKET.transfer_id, sequence, part, 4 * CUT.unit_bytes) for sequence, part in enumerate(runs)]


async def test_a_damaged_chunk_ends_its_lane_unless_that_has_been_given_up() -> None:
    for is_given_up in (False, True):
        ends = Ends()
        lane = await incoming(ends)
        lane.announce(chunks()[0])
        lane.begin_chunk(chunks()[0])
        if is_given_up:
            lane.abort("enough")
        assert lane.end_chunk(chunks()[0], is_intact=False) is None
        assert lane.state is ReceiverState.ABORTED
        assert ends.told == ["enough" if is_given_up else "chunk 0 was damaged on its way"]
        assert lane.is_damaged != is_given_up, "the link is not to be blamed for blocks that were given away"
