"""Sending what a prefix cache holds to a worker that was told to expect it. The same for both kinds of worker.

The blocks are referenced from the match to the transfer's end, however it ends. A source waits for nobody to have
something to send: its KV is there already.
"""

import asyncio
import logging
from collections.abc import Callable, Iterator, Sequence

from twostroke.kvtransfer.sides import Outgoing, SendingSide
from twostroke.model.block_pool import BlockPool
from twostroke.protocol.block_hashes import BlockHash, next_hash, root_hash
from twostroke.protocol.errors import TransferFailed
from twostroke.protocol.tickets import Ticket

_log = logging.getLogger(__name__)


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
