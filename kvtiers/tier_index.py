"""The objects that a tier holds, by name, with the blocks in them, as routers are told; and the uses of objects. Pure.

An index is what a block pool is for a prefix cache: a NamedBlocks (protocol/block_hash.py), whose blocks are the rows
of objects.
"""

from collections import OrderedDict
from collections.abc import Callable

from twostroke.protocol.block_hash import HASH_BYTES, BlockChanges, BlockHash, NameChanges


class TierIndex:
    """Objects by name, with the hashes of their rows."""

    def __init__(self) -> None:
        self._rows: dict[bytes, bytes] = {}  # by the object's name: the hashes of its rows, one after the other
        self._places: dict[bytes, int] = {}  # by the object's name
        self._names: list[bytes] = []  # by place; empty: free
        self._free: list[int] = []
        self._rows_each = 1
        self._changes: BlockChanges | None = None

    def __len__(self) -> int:
        return len(self._rows)

    def __contains__(self, name: bytes) -> bool:
        return name in self._rows

    def add(self, name: bytes, row_hashes: bytes) -> None:
        """Note an object. `row_hashes` are the 16-byte hashes of its rows' blocks, one after the other."""
        if name in self._rows:
            return
        self._rows[name] = row_hashes
        self._rows_each = max(self._rows_each, len(row_hashes) // HASH_BYTES)
        if self._free:
            place = self._free.pop()
            self._names[place] = name
        else:
            place = len(self._names)
            self._names.append(name)
        self._places[name] = place
        if self._changes is not None:
            for one in _hashes(row_hashes):
                self._changes.published(one)

    def discard(self, name: bytes) -> None:
        """Forget an object. Harmless where it is not known."""
        row_hashes = self._rows.pop(name, None)
        if row_hashes is None:
            return
        place = self._places.pop(name)
        self._names[place] = b""
        self._free.append(place)
        if self._changes is not None:
            for one in _hashes(row_hashes):
                self._changes.evicted(one)

    def object_names(self) -> list[bytes]:
        """Return the names of all objects."""
        return list(self._rows)

    # --- as NamedBlocks ---

    @property
    def num_blocks(self) -> int:
        return len(self._names) * self._rows_each

    def names(self, first: int, end: int) -> list[BlockHash]:
        """Return the names of rows: those of whole objects that begin within these numbers."""
        found: list[BlockHash] = []
        for place in range(-(-first // self._rows_each), min(-(-end // self._rows_each), len(self._names))):
            found += _hashes(self._rows.get(self._names[place], b""))
        return found

    def record_changes(self, began: Callable[[], None] | None) -> None:
        self._changes = None if began is None else BlockChanges(began)

    def take_changes(self) -> NameChanges | None:
        if self._changes is None:
            raise ValueError("no changes of names are recorded")
        return self._changes.take()


def _hashes(packed: bytes) -> list[BlockHash]:
    return [packed[start : start + HASH_BYTES] for start in range(0, len(packed), HASH_BYTES)]


MAX_NAMES = 1 << 18
"""Objects whose uses are remembered, at about 150 bytes each: of 256 tokens, 67 million tokens."""


class UseCounts:
    """Uses of the objects that were used last."""

    def __init__(self, most_names: int = MAX_NAMES):
        self._most_names = most_names
        self._uses: OrderedDict[bytes, int] = OrderedDict()  # by the name's first bytes; the oldest first

    def use(self, name: bytes) -> int:
        """Count a use of an object; return its uses so far, this one included."""
        key = name[:8]
        uses = self._uses.pop(key, 0) + 1
        self._uses[key] = uses
        if len(self._uses) > self._most_names:
            self._uses.popitem(last=False)
        return uses
