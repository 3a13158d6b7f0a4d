"""Retention: which cached blocks of a pool are kept beyond their turn, because clients wish it.

A client's wish stands on a block as long as the block has references or is kept. A block with a wish that loses its
last reference is kept: eviction passes it over for the wish's seconds, counted from then. So each use renews the wish.

Clients share a pool. One client keeps at most `CLIENT_SHARE` of its blocks, and all clients together `TOTAL_SHARE`.
Beyond the first its own block that was released the longest ago is kept no more, and loses its wish. Beyond the second
that happens to the client that keeps the most: those that keep little lose nothing to newer wishes. So it is within a
client's share: a wish that has more than half of it kept displaces its own blocks alone.

Users would feel the difference at a pause: without retention the traffic of others evicts a prompt that returns soon.

Pure, without a clock. Each operation is O(1), O(clients) beyond `TOTAL_SHARE`, and `next_to_evict` O(lengths of
wishes), of which the APIs have three.
"""

from collections import OrderedDict
from collections.abc import Iterable
from itertools import count
from typing import NamedTuple, TypeVar

Key = TypeVar("Key", bytes, float, int)

CLIENT_SHARE = 0.25
"""Share of a pool's blocks that one client may have kept."""
TOTAL_SHARE = 0.5
"""Share of a pool's blocks that all clients together may have kept."""


class RetentionWish(NamedTuple):
    """A client's wish for a block."""

    client: bytes
    keep_s: float  # seconds after the block's last release
    number: int  # of all blocks of one wish


class Retention:
    """The wishes for a pool's blocks, and the blocks that are kept for them."""

    def __init__(self, num_blocks: int):
        """`num_blocks` is the pool's size, of which clients have their shares."""
        self.wishes: dict[int, RetentionWish] = {}  # by block, with references or kept
        self.kept: OrderedDict[int, float] = OrderedDict()  # when each was released, the oldest first
        self._most_of_client = int(num_blocks * CLIENT_SHARE)
        self._most_of_wish = (self._most_of_client + 1) // 2  # where others of the client need the rest
        self._most = int(num_blocks * TOTAL_SHARE)
        self._numbers = count()
        # The same blocks in the same order, by client, by wish and by length. No group is empty.
        self._by_client: dict[bytes, OrderedDict[int, None]] = {}
        self._by_wish: dict[int, OrderedDict[int, None]] = {}
        self._by_length: dict[float, OrderedDict[int, None]] = {}

    def wish(self, block_ids: Iterable[int], client: bytes, keep_s: float) -> None:
        """Note a wish for blocks with references. A longer wish for the same block stands, whoever has it."""
        wish = RetentionWish(client, keep_s, next(self._numbers))
        for block_id in block_ids:
            current = self.wishes.get(block_id)
            if current is None or current.keep_s <= keep_s:
                self.wishes[block_id] = wish

    def keep(self, block_id: int, now: float) -> int | None:
        """Keep a block with a wish that has lost its last reference.

        Return the block that is kept no more in its place, which may be the same; None where there is room.
        """
        client, keep_s, number = self.wishes[block_id]
        self.kept[block_id] = now
        mine = self._by_client.setdefault(client, OrderedDict())
        same_wish = self._by_wish.setdefault(number, OrderedDict())
        mine[block_id] = same_wish[block_id] = self._by_length.setdefault(keep_s, OrderedDict())[block_id] = None
        if len(mine) > self._most_of_client:
            displaced = next(iter(same_wish if len(same_wish) > self._most_of_wish else mine))
        elif len(self.kept) > self._most:
            _, largest = max((len(blocks), client) for client, blocks in self._by_client.items())
            displaced = next(iter(self._by_client[largest]))
        else:
            return None
        self.drop(displaced)
        return displaced

    def revive(self, block_id: int, now: float) -> None:
        """Keep a block no more that gets a reference. Its wish stands unless its time has run out."""
        released_at, wish = self.kept[block_id], self.wishes[block_id]
        self.drop(block_id)
        if now < released_at + wish.keep_s:
            self.wishes[block_id] = wish

    def drop(self, block_id: int) -> None:
        """Forget a kept block and its wish."""
        client, keep_s, number = self.wishes.pop(block_id)
        del self.kept[block_id]
        _remove(self._by_client, client, block_id)
        _remove(self._by_wish, number, block_id)
        _remove(self._by_length, keep_s, block_id)

    def next_to_evict(self, now: float, oldest: float | None) -> int | None:
        """Return the kept block that is evicted next; None: the ordinary block that was released at `oldest` is.

        A wish whose time has run out counts for nothing: the block that was released first goes first. With no ordinary
        block left (`oldest` is None) the block goes whose time runs out first. None too where no block is kept.
        """
        firsts = [(keep_s, next(iter(blocks))) for keep_s, blocks in self._by_length.items()]
        expired = [block_id for keep_s, block_id in firsts if self.kept[block_id] + keep_s <= now]
        if expired:
            first = min(expired, key=lambda block_id: self.kept[block_id])
            return first if oldest is None or self.kept[first] < oldest else None
        if oldest is not None or not firsts:
            return None
        return min(firsts, key=lambda pair: self.kept[pair[1]] + pair[0])[1]

    def is_sound(self) -> bool:
        """Recount everything; return whether the books agree and the shares are kept. O(kept blocks)."""
        blocks = list(self.kept)
        by_client: dict[bytes, list[int]] = {}
        by_wish: dict[int, list[int]] = {}
        by_length: dict[float, list[int]] = {}
        for block_id in blocks:
            if block_id not in self.wishes:
                return False
            client, keep_s, number = self.wishes[block_id]
            by_client.setdefault(client, []).append(block_id)
            by_wish.setdefault(number, []).append(block_id)
            by_length.setdefault(keep_s, []).append(block_id)
        return (
            {client: list(order) for client, order in self._by_client.items()} == by_client
            and {number: list(order) for number, order in self._by_wish.items()} == by_wish
            and {keep_s: list(order) for keep_s, order in self._by_length.items()} == by_length
            and all(len(order) <= self._most_of_client for order in by_client.values())
            and len(blocks) <= self._most
            and blocks == sorted(blocks, key=lambda block_id: self.kept[block_id])
        )


def _remove(groups: dict[Key, OrderedDict[int, None]], key: Key, block_id: int) -> None:
    """Remove a block from its group, and the group with its last block."""
    del groups[key][block_id]
    if not groups[key]:
        del groups[key]
