"""The transfers' simulation is worth something: with one safeguard switched off, it goes red within some hundred seeds.

Where two safeguards stand behind each other, so that neither can be missed alone, both are switched off.
"""

import asyncio
from collections.abc import Callable, Coroutine
from contextlib import suppress
from copy import copy
from dataclasses import dataclass
from typing import Any

import pytest
from msgspec.structs import replace

from tests.simulation.transfers.plan import make_plan
from tests.simulation.transfers.run import run_plan
from twostroke.kvtransfer import lifecycle, receiver, sender
from twostroke.kvtransfer.lifecycle import ReceiverState, SenderState, TransferEvent
from twostroke.kvtransfer.receiver import KVReceiver, ReceiverConnection
from twostroke.kvtransfer.sender import KVSender
from twostroke.kvtransfer.timeouts import Deadline, LeasedConnection, all_ended, finish, run_until_lost
from twostroke.kvtransfer.transfer import IncomingPairTransfer, OutgoingPairTransfer, UsedTickets
from twostroke.protocol.errors import ConnectionLost
from twostroke.protocol.messages import Chunk, Commit, Hello, Offer
from twostroke.protocol.requests import Peer, Ticket, verify_ticket

MOST_SEEDS = 1000


@dataclass(frozen=True)
class Sabotage:
    """Safeguards switched off: each `target`'s `name` becomes `replacement`; in a dict, `name` is the key."""

    what: str
    patches: tuple[tuple[Any, Any, Any], ...]
    seen_by: int = 0  # the seed that is tried first, where the others take long to see it


# --- tickets ---


def _verify_anything(secret: bytes, ticket: Ticket, *, source: Peer, target: Peer) -> None:
    """Verify nothing, as if every signature were right."""
    if (ticket.source, ticket.target) != (source, target):
        verify_ticket(secret, ticket, source=source, target=target)


def _verify_any_epoch(secret: bytes, ticket: Ticket, *, source: Peer, target: Peer) -> None:
    """Verify no epoch, as if all incarnations of a worker were one."""
    verify_ticket(secret, ticket, source=ticket.source, target=ticket.target)


def _be_whoever_is_looked_for(connection: ReceiverConnection, hello: Hello) -> Any:
    """Claim the identity that the peer looks for, so that neither the Welcome nor the chunks' seals tell the epochs
    apart."""
    connection._receiver = copy(connection._receiver)
    connection._receiver.peer = hello.receiver
    return _fit(connection, hello)


def _pairs_of_any_epoch(sender: KVSender, ticket: Ticket) -> Any:
    return _rank_pairs(sender, replace(ticket, source=sender.peer))


def _use_any_number_of_times(tickets: UsedTickets, transfer_id: bytes, rank_pair: int = 0) -> bool:
    _use(tickets, transfer_id, rank_pair)
    return True


def _keep_any_offer(desk: KVReceiver, connection: ReceiverConnection, offer: Offer) -> None:
    desk.config = desk.config.model_copy(update={"max_pending_offers": 10**9})
    _offered(desk, connection, offer)


def _match_any_size(
    desk: KVReceiver, rank_pair: IncomingPairTransfer, offer: Offer, connection: ReceiverConnection
) -> None:
    _match(desk, rank_pair, replace(offer, num_tokens=rank_pair.transfer.num_tokens), connection)


# --- bytes ---


def _believe_every_checksum(rank_pair: IncomingPairTransfer, chunk: Chunk, *, has_right_checksum: bool) -> Any:
    return _end_chunk(rank_pair, chunk, has_right_checksum=True)


def _seed_nothing(chunk: Chunk, source: Peer, target: Peer) -> int:
    return 0


# --- chunks and commits ---


def _forget_what_was_taken(rank_pair: IncomingPairTransfer, chunk: Chunk) -> str | None:
    rank_pair._taken = [bytearray(len(layer)) for layer in rank_pair._taken]
    return _fault(rank_pair, chunk)


def _let_skipped_units_come(rank_pair: IncomingPairTransfer, chunk: Chunk) -> str | None:
    skipped, rank_pair._num_skipped = rank_pair._num_skipped, 0
    fault = _fault(rank_pair, chunk)
    rank_pair._num_skipped = skipped
    return fault


def _find_no_fault(rank_pair: IncomingPairTransfer, chunk: Chunk) -> str | None:
    """Find no fault, as if a chunk in its turn were always right."""
    if chunk.sequence != rank_pair._num_announced:
        return _fault(rank_pair, chunk)
    rank_pair._num_announced += 1
    return None


def _commit_what_is_there(rank_pair: IncomingPairTransfer, message: Commit) -> Any:
    return _commit(rank_pair, replace(message, num_chunks=rank_pair._num_announced))


def _verify_with_units_missing(rank_pair: IncomingPairTransfer) -> Any:
    missing, rank_pair._num_missing = rank_pair._num_missing, 0
    answer = _verify(rank_pair)
    rank_pair._num_missing = missing
    return answer


def _verify_with_chunks_missing(rank_pair: IncomingPairTransfer) -> Any:
    if rank_pair._commit is not None and rank_pair.state is ReceiverState.GRANTED:
        rank_pair._num_whole, rank_pair._num_missing = rank_pair._num_announced, 0
    return _verify(rank_pair)


def _keep_the_pair(desk: KVReceiver, rank_pair: IncomingPairTransfer) -> None:
    connection = desk._connections.get(rank_pair)
    _pair_ended(desk, rank_pair)
    if connection is not None and rank_pair.state is ReceiverState.ABORTED:
        connection.pairs[rank_pair.ticket.transfer_id] = rank_pair


def _begin_although_aborted(rank_pair: IncomingPairTransfer, chunk: Chunk) -> Any:
    if rank_pair.state is ReceiverState.ABORTED and rank_pair._shard is not None:
        return rank_pair._shard.segments(chunk.runs, rank_pair.transfer.block_ids)
    return _begin_chunk(rank_pair, chunk)


# --- leases, and the order of ends ---


async def _watch_for_ever(connection: LeasedConnection) -> None:
    while True:
        with suppress(ConnectionLost):
            await _watch(connection)
        await asyncio.sleep(connection._lease_s / 3)


def _never_restart(deadline: Deadline, expired: Callable[[], None]) -> None:
    return


def _restart_once(deadline: Deadline, expired: Callable[[], None]) -> None:
    if not deadline.runs:
        _restart(deadline, expired)


def _leave_pairs_of_lost_connections(rank_pair: IncomingPairTransfer, reason: str) -> None:
    """Their deadlines end them some day."""


def _hear_nothing_of_room(rank_pair: OutgoingPairTransfer) -> None:
    """The target's request waits for it, and the source's patience ends."""


def _keep_an_abort_to_oneself(desk: KVReceiver, rank_pair: IncomingPairTransfer, reason: str) -> None:
    """The source finds out some day."""


async def _leave_the_link_open(work: Coroutine[None, None, None]) -> None:
    if work.__qualname__.endswith("Link.close"):
        work.close()
    else:
        await finish(work)


_later: set[asyncio.Task[None]] = set()


def _do_later(work: Coroutine[None, None, None]) -> None:
    async def wait_and_do() -> None:
        await asyncio.sleep(0.05)
        await work

    _later.add(task := asyncio.get_running_loop().create_task(wait_and_do()))
    task.add_done_callback(_later.discard)


async def _leave_the_movers_for_a_while(*parts: Coroutine[None, None, None]) -> str:
    """Leave the movers for a while, as if a connection's end need not wait for what still moves on its link."""
    if not parts[0].__qualname__.endswith(("_send_chunks", "_receive_chunks")):
        return await run_until_lost(*parts)
    tasks = [asyncio.get_running_loop().create_task(part) for part in parts]

    async def end() -> None:
        for task in tasks:
            task.cancel()
        await all_ended(tasks)

    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    except asyncio.CancelledError:
        _do_later(end())
        raise
    await end()
    return "lost"


async def _close_the_link_later(work: Coroutine[None, None, None]) -> None:
    if work.__qualname__.endswith("Link.close"):
        _do_later(work)
    else:
        await finish(work)


_fit = ReceiverConnection._fit
_rank_pairs = KVSender._rank_pairs
_use = UsedTickets.use
_offered = KVReceiver.offered
_match = KVReceiver._match
_end_chunk = IncomingPairTransfer.end_chunk
_fault = IncomingPairTransfer._fault
_commit = IncomingPairTransfer.commit
_verify = IncomingPairTransfer._verify
_pair_ended = KVReceiver.pair_ended
_begin_chunk = IncomingPairTransfer.begin_chunk
_restart = Deadline.restart
_watch = LeasedConnection.watch

SABOTAGES = [
    Sabotage("the signature of a ticket is not checked", ((receiver, "verify_ticket", _verify_anything),)),
    Sabotage(
        "a ticket of another epoch of the source is as good",
        ((KVSender, "_rank_pairs", _pairs_of_any_epoch), (receiver, "verify_ticket", _verify_any_epoch)),
    ),
    Sabotage(
        "a ticket of another epoch of the target is as good",
        ((ReceiverConnection, "_fit", _be_whoever_is_looked_for), (receiver, "verify_ticket", _verify_any_epoch)),
        seen_by=101,
    ),
    Sabotage("a ticket is good for many transfers", ((UsedTickets, "use", _use_any_number_of_times),)),
    Sabotage("offers that wait are not counted", ((KVReceiver, "offered", _keep_any_offer),)),
    Sabotage("an offer may be of any size", ((KVReceiver, "_match", _match_any_size),), seen_by=280),
    Sabotage("checksums are not checked", ((IncomingPairTransfer, "end_chunk", _believe_every_checksum),)),
    Sabotage(
        "a checksum does not tell whose bytes they are",
        ((sender, "chunk_seed", _seed_nothing), (receiver, "chunk_seed", _seed_nothing)),
    ),
    Sabotage("units may come twice", ((IncomingPairTransfer, "_fault", _forget_what_was_taken),)),
    Sabotage("skipped units may come", ((IncomingPairTransfer, "_fault", _let_skipped_units_come),)),
    Sabotage("units may lie anywhere", ((IncomingPairTransfer, "_fault", _find_no_fault),)),
    Sabotage(
        "a commit may forget chunks",
        (
            (IncomingPairTransfer, "commit", _commit_what_is_there),
            (IncomingPairTransfer, "_verify", _verify_with_units_missing),
        ),
    ),
    Sabotage(
        "a commit does not wait for its chunks",
        ((IncomingPairTransfer, "_verify", _verify_with_chunks_missing),),
    ),
    Sabotage(
        "chunks of an aborted transfer still go into its blocks",
        ((KVReceiver, "pair_ended", _keep_the_pair), (IncomingPairTransfer, "begin_chunk", _begin_although_aborted)),
    ),
    Sabotage("a silent peer keeps its lease", ((LeasedConnection, "watch", _watch_for_ever),)),
    Sabotage("a peer that makes no progress is waited for", ((Deadline, "restart", _never_restart),)),
    Sabotage("a source gives up KV that is awaited", ((OutgoingPairTransfer, "awaited", _hear_nothing_of_room),)),
    Sabotage("progress does not count", ((Deadline, "restart", _restart_once),)),
    Sabotage(
        "the end of a connection is not the end of its rank pairs",
        ((IncomingPairTransfer, "peer_lost", _leave_pairs_of_lost_connections),),
    ),
    Sabotage("the source is not told of an abort", ((KVReceiver, "gave_up", _keep_an_abort_to_oneself),), seen_by=583),
    Sabotage("a lost connection is used again", ((KVSender, "forget", lambda sender, connection: None),)),
    Sabotage("links are not closed", ((sender, "finish", _leave_the_link_open),)),
    Sabotage(
        "an abort does not wait for the chunk that is being written",
        ((lifecycle._TABLE, (ReceiverState.RECEIVING, TransferEvent.ABORT), ReceiverState.ABORTED),),
    ),
    Sabotage(
        "an abort does not wait for the chunk that is being read",
        ((lifecycle._TABLE, (SenderState.SENDING, TransferEvent.ABORT), SenderState.ABORTED),),
    ),
    Sabotage(
        "a lost connection does not wait for its link's end",
        ((receiver, "run_until_lost", _leave_the_movers_for_a_while), (receiver, "finish", _close_the_link_later)),
    ),
]


def test_the_same_seeds_are_green_with_every_safeguard():
    for seed in range(100):
        run_plan(make_plan(seed))


@pytest.mark.parametrize("sabotage", SABOTAGES, ids=lambda sabotage: sabotage.what)
def test_the_lifecycle_goes_red_when(sabotage: Sabotage, monkeypatch: pytest.MonkeyPatch):
    for target, name, replacement in sabotage.patches:
        if isinstance(target, dict):
            monkeypatch.setitem(target, name, replacement)
        else:
            monkeypatch.setattr(target, name, replacement)
    for seed in (sabotage.seen_by, *range(MOST_SEEDS)):
        try:
            run_plan(make_plan(seed))
        except Exception as error:
            print(f"seed {seed}: {type(error).__name__}: {error}")
            return
    pytest.fail(f"{MOST_SEEDS} seeds did not notice that {sabotage.what}")
