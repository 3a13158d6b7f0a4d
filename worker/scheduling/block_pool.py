"""The KV blocks of a worker: references, and a prefix cache of blocks without references.

A block is in one of three states, and every operation is O(1) per block:

    free      no reference, no name: its contents have no meaning
    owned     one reference for each holder; it has a name once it is full and published
    cached    no reference, but a name: `match` can revive it, `allocate` may evict it, later where a client wants it
              kept

The end of a prompt within a block may have a name of its own, a tail. A request with the same prompt copies the block,
and computes only its last token: so choices of one request share their prompt up to where they diverge.

A prefix is cached where every group of layers (protocol/kv_layout.py) has what the tokens after it attend to: all of
it, or the blocks of its window. A name is a hash and a group. Tables are lists of rows with a block for each group.

Nothing here does I/O, knows tensors or takes locks: a pool belongs to one event loop.

Retention keeps cached blocks beyond their turn, because clients want it:

A client's wish stands on a block as long as the block has references or is kept. A block with a wish that loses its
last reference is kept: eviction passes it over for the wish's seconds, counted from then. So each use renews the wish.

Clients share a pool. One client keeps at most `CLIENT_SHARE` of its blocks, and all clients together `TOTAL_SHARE`.
Beyond the first its own block that was released the longest ago is kept no more, and loses its wish. Beyond the second
that happens to the client that keeps the most: those that keep little lose nothing to newer wishes. So it is within a
client's share: a wish that has more than half of it kept displaces its own blocks alone.

Users would feel the difference at a pause: without retention the traffic of others evicts a prompt that returns soon.
Each operation is O(1), O(clients) beyond `TOTAL_SHARE`, and `next_to_evict` O(lengths of wishes), of which the APIs
have three."""

import math
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from itertools import count
from typing import NamedTuple, TypeVar

from twostroke.protocol.block_hash import BlockChanges, BlockHash, NameChanges
from twostroke.protocol.clock import Clock
from twostroke.protocol.errors import TwostrokeError
from twostroke.protocol.kv_layout import NO_BLOCK, ONE_GROUP, STATE_WINDOW, KVGroups

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


_LONG_AGO = -math.inf


class OutOfBlocks(TwostrokeError):
    """Fewer blocks can be allocated than were requested. None was taken."""


class BlockPoolCorrupted(TwostrokeError):
    """The pool's books contradict themselves: a block leaked, or has two owners. The worker can't go on."""


class BlockPool:
    """Reference counts over `num_blocks` block ids, with a prefix cache keyed by block hashes.

    A sequence releases a window's first block for each that it takes at the window's end. So a window's block that
    several sequences share counts once for each of them: each will need another in its place.
    """

    def __init__(self, num_blocks: int, block_size: int, groups: KVGroups = ONE_GROUP, clock: Clock = time.monotonic):
        """`block_size` is in tokens; `clock` times retention. Raises ValueError unless both are positive."""
        if num_blocks < 1 or block_size < 1:
            raise ValueError(f"a pool needs blocks and tokens in them, not {num_blocks} blocks of {block_size}")
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.groups = groups
        self._references = [0] * num_blocks
        self._free = list(range(num_blocks - 1, -1, -1))  # a stack: recently used memory is warm
        self._cached: OrderedDict[int, float] = OrderedDict()  # when each was released, the first one first
        self._retention = Retention(num_blocks)
        self._kept, self._wishes = self._retention.kept, self._retention.wishes
        self._clock = clock
        self._names: list[BlockHash | None] = [None] * num_blocks
        self._groups = [0] * num_blocks  # of those that have names
        self._by_name: list[dict[BlockHash, int]] = [{} for _ in groups.windows]
        # The group whose names are reported. States stand for all groups: KV from elsewhere comes without those of a
        # prefix's rows, and keys and values alone make no hit.
        self._told = groups.windows.index(STATE_WINDOW) if STATE_WINDOW in groups.windows else 0
        self._by_tail: dict[BlockHash, int] = {}
        self._tails: dict[int, BlockHash] = {}  # by block
        self._num_shared = 0  # references to windows' blocks, beyond the first one of each
        self._changes: BlockChanges | None = None  # while changes are recorded

    @property
    def free_blocks(self) -> int:
        """Blocks that can be allocated now, cached ones included; negative where more of windows are shared."""
        return len(self._free) + len(self._cached) + len(self._kept) - self._num_shared

    @property
    def owned_blocks(self) -> int:
        """Blocks with references: 0 on an idle worker."""
        return self.num_blocks - len(self._free) - len(self._cached) - len(self._kept)

    def references(self, block_id: int) -> int:
        """Return the number of a block's references."""
        return self._references[block_id]

    def num_freed(self, block_ids: Iterable[int]) -> int:
        """Return how many more blocks could be allocated once a table's holder has released it."""
        return sum(
            block_id != NO_BLOCK and (self._references[block_id] == 1 or self._is_of_window(block_id))
            for block_id in block_ids
        )

    def lookup(self, hashes: Iterable[BlockHash]) -> int:
        """Return the length of the longest cached prefix of `hashes`, in rows. Changes nothing."""
        return len(self._find(hashes)) // self.groups.count

    def match(self, hashes: Iterable[BlockHash]) -> list[int]:
        """Return the table of the longest cached prefix of `hashes`, with one more reference on each of its blocks.

        Where `free_blocks` is negative then, the caller must release the table at once.
        """
        matched = self._find(hashes)
        for block_id in matched:
            self._refer(block_id)
        return matched

    def take_rows(self, first_row: int, hashes: Sequence[BlockHash]) -> tuple[list[int], frozenset[int]] | None:
        """Return the table of rows from `first_row` on that have these names, with one more reference on each block.

        With it come the groups of which rows are missing that the token behind the last row attends to; the table has
        NO_BLOCK for all rows of these. Return None where a group that keeps all tokens lacks one.
        """
        groups, size = self.groups, self.block_size
        end_row = first_row + len(hashes)
        table = [NO_BLOCK] * (len(hashes) * groups.count)
        lacking: set[int] = set()
        for group, window in enumerate(groups.windows):
            first = max(first_row, groups.first_kept(group, end_row * size) // size)
            found = [self._by_name[group].get(name) for name in hashes[first - first_row :]]
            if None in found:
                if not window:
                    return None
                lacking.add(group)
                continue
            for row, block_id in enumerate(found, first - first_row):
                table[row * groups.count + group] = NO_BLOCK if block_id is None else block_id
        for block_id in table:
            self._refer(block_id)
        return table, frozenset(lacking)

    def allocate(self, count: int) -> list[int]:
        """Return `count` blocks with one reference each; evict the least recently released cached blocks if needed.

        Blocks that clients want kept are evicted after all others. Raises OutOfBlocks, with nothing changed, where
        fewer are free.
        """
        if count > self.free_blocks:
            raise OutOfBlocks(f"{count} blocks wanted, {self.free_blocks} of {self.num_blocks} free")
        free, references = self._free, self._references
        allocated = [free.pop() if free else self._evict() for _ in range(count)]
        for block_id in allocated:
            references[block_id] = 1
        return allocated

    def release(self, block_ids: Sequence[int]) -> None:
        """Remove one reference from each block of a table, given in the order of their tokens. NO_BLOCK is skipped.

        A published block without references stays cached; an unpublished one is free at once. The table's last
        block goes first in the order of eviction: a prefix without its end is of use, an end without its prefix is not.
        A block that has only a tail goes before all others.
        Raises ValueError, with nothing changed, for a block without references or that is listed twice.
        """
        block_ids = [block_id for block_id in block_ids if block_id != NO_BLOCK]
        self._require_owned(block_ids)
        references, names, cached, wishes = self._references, self._names, self._cached, self._wishes
        # Without a wish nothing is kept now, and what is kept later is released later than all these.
        now = self._clock() if wishes else _LONG_AGO
        for block_id in reversed(block_ids):
            references[block_id] -= 1
            if references[block_id] > 0:
                self._num_shared -= self._is_of_window(block_id)
                continue
            if names[block_id] is not None:
                cached[block_id] = now
            elif block_id in self._tails:
                cached[block_id] = _LONG_AGO
                cached.move_to_end(block_id, last=False)
            else:
                self._free.append(block_id)
        if wishes:
            self._keep(block_ids, now)

    def retain(self, block_ids: Iterable[int], client: bytes, keep_s: float) -> None:
        """Have owned blocks kept for `keep_s` seconds after their release, as retention.py says.

        Raises ValueError, with nothing changed, like `release`.
        """
        block_ids = [block_id for block_id in block_ids if block_id != NO_BLOCK]
        self._require_owned(block_ids)
        self._retention.wish(block_ids, client, keep_s)

    def publish(self, block_id: int, name: BlockHash, group: int = 0) -> None:
        """Name a full, owned block. A name that another block has stays there: the caller's block remains unnamed.

        Raises ValueError for a block without references, or that already has another name.
        """
        self._require_owned((block_id,))
        current = self._names[block_id]
        if current is not None and current != name:
            raise ValueError(f"block {block_id} already holds other tokens")
        by_name = self._by_name[group]
        if name not in by_name:
            by_name[name] = block_id
            self._names[block_id] = name
            self._groups[block_id] = group
            if self._changes is not None and group == self._told:
                self._changes.published(name)

    def publish_tail(self, block_id: int, name: BlockHash) -> None:
        """Name the prompt tokens at the beginning of an owned block, whose holder only writes behind them.

        A tail that has a block already stays there, and a block keeps the tail that it has.
        """
        self._require_owned((block_id,))
        if name not in self._by_tail and block_id not in self._tails:
            self._by_tail[name] = block_id
            self._tails[block_id] = name

    def take_tail(self, name: BlockHash) -> int | None:
        """Return the block that begins with these tokens, with one more reference; None: there is none."""
        block_id = self._by_tail.get(name)
        if block_id is not None:
            if self._references[block_id] == 0:
                self._revive(block_id)
            self._references[block_id] += 1
        return block_id

    def names(self, first: int, end: int) -> list[BlockHash]:
        """Return the names in the prefix cache of blocks `first` up to `end`, of the first group or of states.

        The other groups' names follow from these, except for windows of which blocks were evicted.
        """
        named = zip(self._names[first:end], self._groups[first:end], strict=True)
        return [name for name, group in named if name is not None and group == self._told]

    def record_changes(self, began: Callable[[], None] | None) -> None:
        """Record names that enter and leave from now on; `began` is that of BlockChanges. None: stop recording."""
        self._changes = None if began is None else BlockChanges(began)

    def take_changes(self) -> NameChanges | None:
        """End the window of changes, like BlockChanges.take. Raises ValueError where nothing is recorded."""
        if self._changes is None:
            raise ValueError("no changes of names are recorded")
        return self._changes.take()

    def check_integrity(self) -> None:
        """Recount everything. Raises BlockPoolCorrupted where the books are off. O(num_blocks): for idle workers."""
        if min(self._references) < 0:
            raise BlockPoolCorrupted(f"block {self._references.index(min(self._references))} has negative references")
        unowned = sorted([*self._free, *self._cached, *self._kept])
        if unowned != [block_id for block_id, count in enumerate(self._references) if count == 0]:
            raise BlockPoolCorrupted("the unowned blocks are not those on the free and cached lists, once each")
        names: list[dict[BlockHash, int]] = [{} for _ in self._by_name]
        for block_id, (name, group) in enumerate(zip(self._names, self._groups, strict=True)):
            if name is not None:
                names[group][name] = block_id
        if names != self._by_name or sum(map(len, names)) != self.num_blocks - self._names.count(None):
            raise BlockPoolCorrupted("names and blocks do not match one to one")
        shared = sum(
            max(0, count - 1) for block_id, count in enumerate(self._references) if self._is_of_window(block_id)
        )
        if shared != self._num_shared:
            raise BlockPoolCorrupted(f"{shared} references share windows' blocks, and {self._num_shared} were counted")
        if {name: block_id for block_id, name in self._tails.items()} != self._by_tail:
            raise BlockPoolCorrupted("tails and blocks do not match one to one")
        if any(self._names[block_id] is not None or block_id in self._tails for block_id in self._free):
            raise BlockPoolCorrupted("a free block has a name")
        if any(self._names[block_id] is None and block_id not in self._tails for block_id in self._cached):
            raise BlockPoolCorrupted("a cached block has no name")
        if not self._retention.is_sound():
            raise BlockPoolCorrupted("the blocks that are kept are not those that clients wish, within their shares")
        if any(self._names[block_id] is None for block_id in self._kept):
            raise BlockPoolCorrupted("a block that is kept has no name")
        if any(self._references[block_id] == 0 and block_id not in self._kept for block_id in self._wishes):
            raise BlockPoolCorrupted("a wish stands on a block that is neither owned nor kept")

    def _refer(self, block_id: int) -> None:
        """Add a reference to a named block. NO_BLOCK is skipped."""
        if block_id == NO_BLOCK:
            return
        if self._references[block_id] == 0:
            if self._kept:
                self._revive(block_id)
            else:
                del self._cached[block_id]
        else:
            self._num_shared += self._is_of_window(block_id)
        self._references[block_id] += 1

    def _keep(self, released: Sequence[int], now: float) -> None:
        """Keep the released blocks that clients wish; those in whose place they are kept count as released now."""
        for block_id in reversed(released):
            if block_id not in self._wishes or self._references[block_id] > 0:
                continue
            if self._names[block_id] is None:  # another block has the name
                del self._wishes[block_id]
                continue
            del self._cached[block_id]
            displaced = self._retention.keep(block_id, now)
            if displaced is not None:
                self._cached[displaced] = now

    def _revive(self, block_id: int) -> None:
        """Take a cached block that gets a reference off the order of eviction."""
        if self._cached.pop(block_id, None) is None:
            self._retention.revive(block_id, self._clock())

    def _evict(self) -> int:
        kept = self._next_kept() if self._kept else None
        block_id = self._cached.popitem(last=False)[0] if kept is None else kept
        tail, name = self._tails.pop(block_id, None), self._names[block_id]
        if tail is not None:
            del self._by_tail[tail]
        if name is None:
            if tail is None:
                raise BlockPoolCorrupted(f"cached block {block_id} has no name")
            return block_id
        group = self._groups[block_id]
        del self._by_name[group][name]
        self._names[block_id] = None
        if self._changes is not None and group == self._told:
            self._changes.evicted(name)
        return block_id

    def _next_kept(self) -> int | None:
        """Return the kept block that is evicted next, which is kept no more; None: the first ordinary one is."""
        oldest = self._cached[next(iter(self._cached))] if self._cached else None
        block_id = self._retention.next_to_evict(self._clock(), oldest)
        if block_id is not None:
            self._retention.drop(block_id)
        return block_id

    def _find(self, hashes: Iterable[BlockHash]) -> list[int]:
        """The table of the longest cached prefix."""
        groups, whole = self.groups, self._by_name[0]
        if not groups.windowed:
            found: list[int] = []
            for name in hashes:
                block_id = whole.get(name)
                if block_id is None:
                    break
                found.append(block_id)
            return found
        return self._find_with_windows(list(hashes))

    def _find_with_windows(self, hashes: Sequence[BlockHash]) -> list[int]:
        groups, size = self.groups, self.block_size
        length = len(hashes)
        for group, window in enumerate(groups.windows):
            if not window:
                held = self._by_name[group]
                length = next((row for row in range(length) if hashes[row] not in held), length)
        held_from = dict.fromkeys(groups.windowed, length)  # rows from here up to `length` are held
        while length:
            for group, row in held_from.items():
                held, first = self._by_name[group], groups.first_kept(group, length * size) // size
                row = min(row, length)
                while row > first and hashes[row - 1] in held:
                    row -= 1
                held_from[group] = row
                if row > first:  # no shorter prefix that ends behind the gap is whole: its window begins before it
                    length = row - 1
                    break
            else:
                break
        table = [NO_BLOCK] * (length * groups.count)
        for group in range(groups.count):
            for row in range(groups.first_kept(group, length * size) // size, length):
                table[row * groups.count + group] = self._by_name[group][hashes[row]]
        return table

    def _is_of_window(self, block_id: int) -> bool:
        return self.groups.windows[self._groups[block_id]] != 0

    def _require_owned(self, block_ids: Sequence[int]) -> None:
        references, num_blocks = self._references, self.num_blocks
        for block_id in block_ids:
            if not 0 <= block_id < num_blocks or references[block_id] == 0:
                raise ValueError(f"block {block_id} has no owner")
        if len(set(block_ids)) != len(block_ids):
            raise ValueError("a block is listed twice")
