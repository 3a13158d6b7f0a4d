"""Prompts whose beginning comes from another worker's prefix cache: the offer, the transfer, and going on without.

The same for both kinds of worker. Nobody waits for a pull in vain for long, and none that fails is anybody's error: the
prompt is computed here.

Sending what a prefix cache holds to a worker that was told to expect it. The same for both kinds of worker.

The blocks are referenced from the match to the transfer's end, however it ends. A source waits for nobody to have
something to send: its KV is there already.
"""

import asyncio
import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

from twostroke.kvtransfer.offers import AwaitedOffers
from twostroke.kvtransfer.sides import Incoming, Outgoing, ReceivingSide, SendingSide
from twostroke.protocol.blocks import BlockHash, next_hash, root_hash
from twostroke.protocol.errors import TransferFailed
from twostroke.protocol.requests import Ticket
from twostroke.worker.block_pool import BlockPool
from twostroke.worker.sequence import SequenceState

_log = logging.getLogger(__name__)


class PullingJob(Protocol):
    """A job of either kind of worker."""

    sequence: SequenceState
    offered_tokens: int  # how much of its beginning another worker offers


JobT = TypeVar("JobT", bound=PullingJob)
JobT_contra = TypeVar("JobT_contra", bound=PullingJob, contravariant=True)


class PullScheduler(Protocol[JobT_contra]):
    """What a worker's scheduler hears of pulls."""

    def offered(self, job: JobT_contra, num_tokens: int) -> None:
        """Another worker offers the KV of a waiting job's first `num_tokens` tokens."""

    def not_offered(self, job: JobT_contra) -> None:
        """No offer comes for a waiting job."""

    def pulled(self, job: JobT_contra) -> int:
        """All offered KV has come; returns how many tokens that spares, 0 where the job has ended meanwhile."""

    def pull_failed(self, job: JobT_contra) -> None:
        """The offered KV does not come, and nothing writes into the job's blocks any more: all is computed here."""


@dataclass(frozen=True, slots=True)
class PullCallbacks(Generic[JobT]):
    """What the worker wants to hear. All are called on the event loop and must not wait."""

    admit: Callable[[], None]  # an offer has come: let in whose turn it is, though a step may be under way
    pulled: Callable[[JobT, int], None]  # so many tokens more than were here; their KV is in the job's blocks
    ended: Callable[[JobT], None]  # a job waits no more, or nothing writes into its blocks any more


class Pulls(Generic[JobT]):
    """One worker's pulls. An offer is waited for `wait_s`."""

    def __init__(
        self,
        *,
        receiver: ReceivingSide,
        offers: AwaitedOffers,
        scheduler: PullScheduler[JobT],
        wait_s: float,
        told: PullCallbacks[JobT],
    ):
        self._receiver = receiver
        self._offers = offers
        self._scheduler = scheduler
        self._wait_s = wait_s
        self._told = told
        self._expected: dict[JobT, Ticket] = {}  # offers that are neither taken nor refused
        self._incoming: dict[JobT, tuple[Incoming, asyncio.Task[None]]] = {}

    @property
    def is_busy(self) -> bool:
        """Whether any KV may still be written."""
        return bool(self._incoming)

    def expect(self, job: JobT, ticket: Ticket) -> None:
        """Wait for the offer to a job that awaits one; it may be here already."""
        self._expected[job] = ticket
        self._offers.wait(
            ticket, self._wait_s, came=lambda: self._offered(job, ticket), missing=lambda: self._not_offered(job)
        )

    def begin(self, job: JobT) -> None:
        """Let the offered KV into the blocks of a job that was admitted to pull.

        Raises RuntimeError for a job that expects no offer.
        """
        ticket = self._expected.pop(job, None)
        if ticket is None:
            raise RuntimeError(f"request {_name(job)} expects no offer")
        sequence, num_tokens = job.sequence, job.offered_tokens
        num_blocks = -(-num_tokens // sequence.block_size)
        incoming = self._receiver.expect(
            ticket, sequence.block_ids[:num_blocks], num_tokens, skip_tokens=sequence.num_computed
        )
        task = asyncio.create_task(self._see_in(job, incoming), name=f"pull {_name(job)}")
        self._incoming[job] = incoming, task

    def refuse(self, job: JobT) -> None:
        """Take no offer any more. Harmless where none is expected, or it is taken already."""
        ticket = self._expected.pop(job, None)
        if ticket is not None:
            self._offers.refuse(ticket)

    def decline(self, ticket: Ticket) -> None:
        """Take no offer to a request that is refused itself: its source would keep the blocks for nobody."""
        self._offers.refuse(ticket)

    def give_up(self, job: JobT, reason: str) -> None:
        """Nobody wants the job's prefix any more, wherever its pull stands. Its blocks may be written a little longer.

        Harmless where nothing is pulled.
        """
        self.refuse(job)
        if job in self._incoming:
            self._incoming[job][0].abort(reason)

    async def ended(self) -> None:
        """Wait until no transfer is under way; the receiver is closed, so none begins."""
        await asyncio.gather(*(task for _, task in self._incoming.values()))

    def _offered(self, job: JobT, ticket: Ticket) -> None:
        num_tokens = self._receiver.offered_tokens(ticket.transfer_id)
        if not num_tokens:  # it was withdrawn again
            self._not_offered(job)
            return
        self._scheduler.offered(job, num_tokens)
        self._told.admit()
        self._told.ended(job)

    def _not_offered(self, job: JobT) -> None:
        self.refuse(job)
        self._scheduler.not_offered(job)
        self._told.ended(job)

    async def _see_in(self, job: JobT, incoming: Incoming) -> None:
        """Until the transfer ends the blocks stay the job's, whatever becomes of the job."""
        try:
            await incoming.verified()
        except TransferFailed as error:
            _log.warning("the prefix of request %s did not come: %s", _name(job), error)
            self._scheduler.pull_failed(job)
        else:
            num_tokens = self._scheduler.pulled(job)
            if num_tokens:
                self._told.pulled(job, num_tokens)
        finally:
            del self._incoming[job]
            self._told.ended(job)


def _name(job: PullingJob) -> str:
    return job.sequence.request.request_id


class PrefixExports:
    """The prefixes that one worker is sending out of `pool`. `ended` is called after each."""

    def __init__(self, *, sender: SendingSide, pool: BlockPool, ended: Callable[[], None]):
        self._sender = sender
        self._pool = pool
        self._ended = ended
        self._sending: set[asyncio.Task[None]] = set()

    @property
    def is_busy(self) -> bool:
        """Whether some export still references blocks."""
        return bool(self._sending)

    def send(self, ticket: Ticket, token_ids: Sequence[int], cache_salt: bytes) -> bool:
        """Begin to send the longest cached prefix of `token_ids`; whether there is one. Never waits.

        It stops short of the last token at least: the target must compute one, or it has nothing to draw from. Where
        nothing is cached the target is told so. A ticket that can't be ours is ignored.
        """
        block_ids = self._pool.match(_matchable_hashes(token_ids, self._pool.block_size, cache_salt))
        if not block_ids:
            try:
                self._sender.decline(ticket, "nothing of the prefix is cached any more")
            except ValueError as error:
                _log.warning("asked for a prefix with a ticket that can't be: %s", error)
            return False
        num_tokens = len(block_ids) * self._pool.block_size
        try:
            transfer = self._sender.open(ticket, num_tokens, block_ids, num_tokens)
        except BaseException:
            self._pool.release(block_ids)
            raise
        transfer.commit(None)
        task = asyncio.create_task(self._see_off(transfer, block_ids), name=f"export to {ticket.target.worker_id}")
        self._sending.add(task)
        task.add_done_callback(self._sending.discard)
        return True

    async def outlive(self) -> None:
        """Return once no export is under way: soon after the sender is closed."""
        await asyncio.gather(*self._sending)

    async def _see_off(self, transfer: Outgoing, block_ids: Sequence[int]) -> None:
        try:
            await transfer.done()
        except TransferFailed as error:
            _log.info("a cached prefix was not sent: %s", error)
        finally:
            self._pool.release(block_ids)
            task = asyncio.current_task()
            if task is not None:
                self._sending.discard(task)
            self._ended()


def _matchable_hashes(token_ids: Sequence[int], block_size: int, salt: bytes) -> Iterator[BlockHash]:
    """Names of the full blocks that leave at least one token, computed as far as they are asked for."""
    parent = root_hash(salt)
    for end in range(block_size, len(token_ids), block_size):
        parent = next_hash(parent, token_ids[end - block_size : end])
        yield parent
