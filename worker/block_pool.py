"""Who holds which KV block, and which unheld blocks still name a known prefix.

A block is in one of three states, and every operation is O(1) per block:

    free      no reference, no name: its contents mean nothing
    owned     one reference for each holder; it has a name once it is full and published
    cached    no reference, but a name: `match` can revive it, `allocate` may evict it

Nothing here does I/O, knows tensors or takes locks: a pool belongs to one event loop.

Which names got into a prefix cache, and which left it, within one window of time. No torch, no I/O.

A name that came and went within the window is not told at all. One that went and came back is told as stored: it lies
in another block now, and whoever reads the cache piece by piece may have passed that one by.
"""

from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence

from twostroke.protocol.blocks import BlockHash, NameChanges
from twostroke.protocol.errors import TwostrokeError

MOST_CHANGES = 65_536
"""Names of one window. Telling more would take longer than to tell all names anew, at leisure."""


class BlockChanges:
    """Records what a block pool tells it; `began` is called with the first change of every window."""

    def __init__(self, began: Callable[[], None]):
        self._began = began
        self._was_there: dict[BlockHash, bool] = {}  # names that were touched: whether they were there at the beginning
        self._stored: set[BlockHash] = set()  # those of them that are there now, though they came within the window
        self._are_too_many = False

    def published(self, name: BlockHash) -> None:
        """A block has got this name, which no other had."""
        self._touch(name, was_there=False)
        self._stored.add(name)

    def evicted(self, name: BlockHash) -> None:
        """No block has this name any more."""
        self._touch(name, was_there=True)
        self._stored.discard(name)

    def take(self) -> NameChanges | None:
        """End the window, and begin another. None where too much has changed to be told."""
        was_there, stored, are_too_many = self._was_there, self._stored, self._are_too_many
        self._was_there, self._stored, self._are_too_many = {}, set(), False
        if are_too_many:
            return None
        removed = [name for name, was in was_there.items() if was and name not in stored]
        return NameChanges(list(stored), removed)

    def _touch(self, name: BlockHash, *, was_there: bool) -> None:
        if not self._was_there:
            self._began()
        if len(self._was_there) < MOST_CHANGES:
            self._was_there.setdefault(name, was_there)
        elif name not in self._was_there:
            self._are_too_many = True


class OutOfBlocks(TwostrokeError):
    """Fewer blocks can be allocated than were asked for. Nothing was taken."""


class BlockPoolCorrupted(TwostrokeError):
    """The pool's books contradict themselves: a block leaked, or has two owners. The worker can't go on."""


class BlockPool:
    """Reference counts over `num_blocks` block ids, with a prefix cache keyed by block hashes."""

    def __init__(self, num_blocks: int, block_size: int):
        """`block_size` is in tokens. Raises ValueError unless both are positive."""
        if num_blocks < 1 or block_size < 1:
            raise ValueError(f"a pool needs blocks and tokens in them, not {num_blocks} blocks of {block_size}")
        self.num_blocks = num_blocks
        self.block_size = block_size
        self._references = [0] * num_blocks
        self._free = list(range(num_blocks - 1, -1, -1))  # a stack: recently used memory is warm
        self._cached: OrderedDict[int, None] = OrderedDict()  # the first is evicted next
        self._names: list[BlockHash | None] = [None] * num_blocks
        self._by_name: dict[BlockHash, int] = {}
        self._changes: BlockChanges | None = None  # while somebody wants to know

    @property
    def free_blocks(self) -> int:
        """Blocks that can be allocated now, cached ones included."""
        return len(self._free) + len(self._cached)

    @property
    def owned_blocks(self) -> int:
        """Blocks that somebody references: 0 on an idle worker."""
        return self.num_blocks - self.free_blocks

    def references(self, block_id: int) -> int:
        """How many holders a block has."""
        return self._references[block_id]

    def lookup(self, hashes: Iterable[BlockHash]) -> int:
        """Length of the longest cached prefix of `hashes`, in blocks. Takes no reference and touches no order."""
        found = 0
        for name in hashes:
            if name not in self._by_name:
                break
            found += 1
        return found

    def match(self, hashes: Iterable[BlockHash]) -> list[int]:
        """The blocks of the longest cached prefix of `hashes`, in order, each with one more reference."""
        matched: list[int] = []
        for name in hashes:
            block_id = self._by_name.get(name)
            if block_id is None:
                break
            if self._references[block_id] == 0:
                del self._cached[block_id]
            self._references[block_id] += 1
            matched.append(block_id)
        return matched

    def allocate(self, count: int) -> list[int]:
        """`count` blocks with one reference each; evicts the least recently released cached blocks where it must.

        Raises OutOfBlocks, with nothing changed, where fewer can be had.
        """
        if count > self.free_blocks:
            raise OutOfBlocks(f"{count} blocks wanted, {self.free_blocks} of {self.num_blocks} free")
        allocated = [self._free.pop() if self._free else self._evict() for _ in range(count)]
        for block_id in allocated:
            self._references[block_id] = 1
        return allocated

    def release(self, block_ids: Sequence[int]) -> None:
        """One reference less on each of a table's blocks, which are given in the order of their tokens.

        A published block without references stays cached; an unpublished one is free at once. The table's last
        block goes first in the order of eviction: a prefix without its end is of use, an end without its prefix is not.
        Raises ValueError, with nothing changed, for a block that nobody owns or that is listed twice.
        """
        self._require_owned(block_ids)
        for block_id in reversed(block_ids):
            self._references[block_id] -= 1
            if self._references[block_id] > 0:
                continue
            if self._names[block_id] is None:
                self._free.append(block_id)
            else:
                self._cached[block_id] = None

    def publish(self, block_id: int, name: BlockHash) -> None:
        """Name a full, owned block. A name that another block has stays there: the caller's block remains unnamed.

        Raises ValueError for a block that nobody owns, or that already has another name.
        """
        self._require_owned((block_id,))
        current = self._names[block_id]
        if current is not None and current != name:
            raise ValueError(f"block {block_id} already holds other tokens")
        if name not in self._by_name:
            self._by_name[name] = block_id
            self._names[block_id] = name
            if self._changes is not None:
                self._changes.published(name)

    def names(self, first: int, end: int) -> list[BlockHash]:
        """Names in the prefix cache that blocks `first` up to `end` have."""
        return [name for name in self._names[first:end] if name is not None]

    def record_changes(self, began: Callable[[], None] | None) -> None:
        """Record names that come and go from now on; `began` is called as BlockChanges does. With None, end that."""
        self._changes = None if began is None else BlockChanges(began)

    def take_changes(self) -> NameChanges | None:
        """As BlockChanges.take. Raises ValueError where nothing is recorded."""
        if self._changes is None:
            raise ValueError("no changes of names are recorded")
        return self._changes.take()

    def check_integrity(self) -> None:
        """Recount everything. Raises BlockPoolCorrupted where the books are off. O(num_blocks): for idle workers."""
        if min(self._references) < 0:
            raise BlockPoolCorrupted(f"block {self._references.index(min(self._references))} has negative references")
        unowned = sorted([*self._free, *self._cached])
        if unowned != [block_id for block_id, count in enumerate(self._references) if count == 0]:
            raise BlockPoolCorrupted("the unowned blocks are not those on the free and cached lists, once each")
        names = {name: block_id for block_id, name in enumerate(self._names) if name is not None}
        if names != self._by_name or len(names) != self.num_blocks - self._names.count(None):
            raise BlockPoolCorrupted("names and blocks do not match one to one")
        if any(self._names[block_id] is not None for block_id in self._free):
            raise BlockPoolCorrupted("a free block has a name")
        if any(self._names[block_id] is None for block_id in self._cached):
            raise BlockPoolCorrupted("a cached block has no name")

    def _evict(self) -> int:
        block_id, _ = self._cached.popitem(last=False)
        name = self._names[block_id]
        if name is None:
            raise BlockPoolCorrupted(f"cached block {block_id} has no name")
        del self._by_name[name]
        self._names[block_id] = None
        if self._changes is not None:
            self._changes.evicted(name)
        return block_id

    def _require_owned(self, block_ids: Sequence[int]) -> None:
        for block_id in block_ids:
            if not 0 <= block_id < self.num_blocks or self._references[block_id] == 0:
                raise ValueError(f"block {block_id} has no owner")
        if len(set(block_ids)) != len(block_ids):
            raise ValueError("a block is listed twice")
