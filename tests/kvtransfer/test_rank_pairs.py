"""A rank pair's own decisions, with nobody else there: above all, when its blocks are free."""

import asyncio

from tests.rigs.kv_pair import TOKEN, D, P, rank_shard
from twostroke.kvtransfer.layout import ChunkPlan
from twostroke.kvtransfer.lifecycle import ReceiverState, SenderState
from twostroke.kvtransfer.transfer import IncomingPairTransfer, IncomingTransfer, OutgoingPairTransfer, OutgoingTransfer
from twostroke.protocol.kv_layout import KVLayout, group_layers
from twostroke.protocol.messages import Chunk, Commit
from twostroke.protocol.requests import Address, Ticket
from twostroke.simulator.virtual_loop import run_virtually

TICKET = Ticket(b"t" * 16, "r", P, D, (Address("127.0.0.1", 1),))
LAYOUT = KVLayout("m", "bfloat16", num_layers=2, num_kv_heads=1, head_dim=6, block_size=4)
SHARD = rank_shard(LAYOUT, 0, 1, 4, "raw")
NUM_TOKENS = 16
BLOCKS = (3, 1, 4, 5)


class Ends:
    """Both sides' observers: keep what they are told."""

    def __init__(self) -> None:
        self.told: list[str] = []
        self.failures: list[str] = []
        self.num_ends = 0

    def has_work(self, rank_pair: OutgoingPairTransfer) -> None:
        pass

    def gave_up(self, rank_pair: OutgoingPairTransfer | IncomingPairTransfer, reason: str) -> None:
        self.told.append(reason)

    def pair_ended(self, rank_pair: OutgoingPairTransfer | IncomingPairTransfer) -> None:
        self.num_ends += 1

    def watch(self, transfer: OutgoingTransfer | IncomingTransfer) -> None:
        """Keep what the transfer is told of its rank pair's failure."""
        fail = transfer.fail

        def note(reason: str) -> None:
            self.failures.append(reason)
            fail(reason)

        transfer.fail = note  # type: ignore[method-assign]


async def offered(ends: Ends, progress_s: float = 20) -> OutgoingPairTransfer:
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
    rank_pair = transfer.add_pair(0, range(2), ends)
    rank_pair.offered()
    return rank_pair


async def outgoing(ends: Ends, progress_s: float = 20) -> OutgoingPairTransfer:
    """Granted, and everything ready."""
    rank_pair = await offered(ends, progress_s)
    rank_pair.granted(SHARD, 0)
    return rank_pair


async def incoming(ends: Ends) -> IncomingPairTransfer:
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
    rank_pair = transfer.pairs[0]
    rank_pair.granted(SHARD)
    return rank_pair


def begin(rank_pair: OutgoingPairTransfer) -> Chunk:
    chunk = rank_pair.begin_chunk(4)
    assert chunk is not None
    return chunk


async def test_a_verified_senders_blocks_are_free_once_the_last_of_its_calls_has_returned() -> None:
    ends = Ends()
    rank_pair = await outgoing(ends)
    rank_pair.commit(TOKEN)
    begin(rank_pair)
    assert rank_pair.take_commit() is None
    begin(rank_pair)
    assert rank_pair.take_commit() == Commit(TICKET.transfer_id, 2, TOKEN)
    assert rank_pair.take_commit() is None
    rank_pair.end_chunk()
    assert rank_pair.state is SenderState.FINISHING
    rank_pair.verified()
    rank_pair.abort("too late")
    assert (rank_pair.state, ends.num_ends) == (SenderState.RELEASING, 0)
    rank_pair.end_chunk()
    assert rank_pair.state is SenderState.RELEASED
    assert (ends.told, ends.failures, ends.num_ends) == ([], [], 1)


def test_a_target_that_says_too_late_that_its_request_waits_for_room_has_not_all_the_time_to_verify() -> None:
    async def script() -> None:
        ends = Ends()
        rank_pair = await outgoing(ends, progress_s=2)
        rank_pair.awaited()
        rank_pair.commit(None)
        for _ in range(2):
            begin(rank_pair)
            rank_pair.end_chunk()
        assert rank_pair.take_commit() is not None
        rank_pair.awaited()
        await asyncio.sleep(3)
        assert ends.failures == ["the target did not verify in time"]
        rank_pair.awaited()
        assert rank_pair.state is SenderState.ABORTING, "it may still be reading"
        await asyncio.sleep(2)
        assert rank_pair.state is SenderState.ABORTED

    run_virtually(script())


def test_a_given_up_senders_blocks_are_free_once_the_target_has_answered_or_had_its_time() -> None:
    async def script() -> None:
        for answers in (True, False):
            ends = Ends()
            rank_pair = await outgoing(ends, progress_s=2)
            begin(rank_pair)
            rank_pair.end_chunk()
            rank_pair.abort("the client left")
            assert (rank_pair.state, ends.num_ends) == (SenderState.ABORTING, 0)
            if answers:
                rank_pair.peer_aborted("heard")
            await asyncio.sleep(0 if answers else 1)
            assert rank_pair.ended == answers
            await asyncio.sleep(2)
            assert rank_pair.state is SenderState.ABORTED
            assert (ends.told, ends.failures, ends.num_ends) == (["the client left"], ["the client left"], 1)

    run_virtually(script())


async def test_a_given_up_senders_blocks_are_free_at_once_where_no_chunk_was_sent() -> None:
    ends = Ends()
    rank_pair = await outgoing(ends)
    rank_pair.abort("the client left")
    assert (rank_pair.state, ends.num_ends) == (SenderState.ABORTED, 1)


async def test_the_targets_answer_does_not_end_a_call_that_reads_the_blocks() -> None:
    ends = Ends()
    rank_pair = await outgoing(ends)
    begin(rank_pair)
    rank_pair.abort("the client left")
    rank_pair.peer_aborted("heard")
    assert (rank_pair.state, ends.num_ends) == (SenderState.ABORTING, 0)
    rank_pair.end_chunk()
    assert (rank_pair.state, ends.num_ends) == (SenderState.ABORTED, 1)


def chunks() -> list[Chunk]:
    """The two chunks of the prompt, as an outgoing rank pair makes them."""
    plan = ChunkPlan(groups=group_layers((0, 0)), layers=range(2), num_tokens=NUM_TOKENS, num_ready_tokens=NUM_TOKENS)
    plan.begin(4, 0)
    runs = [plan.next_runs(4), plan.next_runs(4)]
    return [Chunk(TICKET.transfer_id, sequence, part, 4 * SHARD.unit_bytes) for sequence, part in enumerate(runs)]


async def test_a_damaged_chunk_ends_its_rank_pair_unless_that_has_been_given_up() -> None:
    for is_given_up in (False, True):
        ends = Ends()
        rank_pair = await incoming(ends)
        rank_pair.announce(chunks()[0])
        rank_pair.begin_chunk(chunks()[0])
        if is_given_up:
            rank_pair.abort("enough")
        assert rank_pair.end_chunk(chunks()[0], has_right_checksum=False) is None
        assert rank_pair.state is ReceiverState.ABORTED
        assert ends.told == ["enough" if is_given_up else "chunk 0 was damaged on its way"]
        assert rank_pair.is_damaged != is_given_up, "the link is not to be blamed for blocks that were given away"
