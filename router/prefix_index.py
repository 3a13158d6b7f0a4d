"""Who probably holds the KV of which prefix. Pure and bounded; a guess, since workers evict without a word.

Prefixes are cut into pieces of a fixed number of tokens, whatever the workers' block sizes, and named by the same chain
of hashes as blocks are (protocol/block_hashes.py), the cache salt included.
"""

from collections import OrderedDict
from collections.abc import Collection, Sequence, Set

from protocol.block_hashes import BlockHash, chain_hashes
from protocol.tickets import Peer

PIECE_TOKENS = 32
_NOBODY: frozenset[Peer] = frozenset()


def pieces_of(token_ids: Sequence[int], cache_salt: bytes) -> list[BlockHash]:
    """The names of all whole pieces, in order. Those of a prefix are the first of them."""
    return chain_hashes(token_ids, PIECE_TOKENS, cache_salt)


class PrefixIndex:
    """For each piece the workers that were seen to hold it, with all before it. The least recently used go first."""

    def __init__(self, max_pieces: int = 65536):
        """Raises ValueError unless there is room for one."""
        if max_pieces < 1:
            raise ValueError(f"an index of {max_pieces} pieces holds nothing")
        self._max_pieces = max_pieces
        self._holders: OrderedDict[BlockHash, set[Peer]] = OrderedDict()
        self._workers: set[Peer] = set()

    def __len__(self) -> int:
        return len(self._holders)

    def remember(self, worker: Peer, pieces: Sequence[BlockHash]) -> None:
        """`worker` holds a prefix of these pieces. Of one that is too long for the index the beginning stays."""
        self._workers.add(worker)
        # From the end: a prefix without its end is of use, an end without its prefix is not, and goes first.
        for piece in reversed(pieces[: self._max_pieces]):
            self._holders.setdefault(piece, set()).add(worker)
            self._holders.move_to_end(piece)
        while len(self._holders) > self._max_pieces:
            self._holders.popitem(last=False)

    def find(self, pieces: Sequence[BlockHash]) -> dict[Peer, int]:
        """How many tokens of the prefix each worker holds, as far as is known; those with none are left out."""
        if not self._workers:
            return {}
        held: dict[Peer, int] = {}
        holders: Set[Peer] = self._workers
        known = 0
        for piece in pieces:
            of_piece = self._holders.get(piece, _NOBODY)
            if not holders <= of_piece:
                held.update(dict.fromkeys(holders - of_piece, known * PIECE_TOKENS))
                holders = holders & of_piece
                if not holders:
                    break
            known += 1
        held.update(dict.fromkeys(holders, known * PIECE_TOKENS))
        held = {worker: num_tokens for worker, num_tokens in held.items() if num_tokens}
        for piece in reversed(pieces[:known]):
            self._holders.move_to_end(piece)
        return held

    def keep(self, workers: Collection[Peer]) -> None:
        """Forget all others: a worker that has left, or has restarted, holds nothing. Quick where nobody has left."""
        gone = self._workers - set(workers)
        if not gone:
            return
        self._workers -= gone
        for piece, holders in list(self._holders.items()):
            holders -= gone
            if not holders:
                del self._holders[piece]
