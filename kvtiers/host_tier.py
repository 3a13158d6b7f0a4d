"""The host tier: objects in memory of the worker's host, from which and into which transfers move KV.

Objects on their way from or to a slower tier pass here, so each tier needs the same two ways: memory to storage, and
memory to the worker's cache. What was used last stays until its memory is needed.

A block of memory has an owner from `allocate` to `free` or to the object's eviction. An object that is pinned is being
read or written by somebody, and stays. Pure but for the memory itself: no I/O, no clock.

`PrefixObjects` says which objects a prefix has. An object holds `rows_each` rows of a prefix. Of a group with a window
it keeps the rows to which the token behind the object's own end attends. So a prefix may end with any object: what it
needs of windows lies in that one and in those before.
"""

from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from twostroke.kvtiers.identity import tenant_digest
from twostroke.kvtiers.objects import ObjectRows, SectionData, rows_key
from twostroke.kvtiers.storage_tier import ObjectRef
from twostroke.kvtransfer.link import HostStore
from twostroke.kvtransfer.transports.host_units import adjacent_runs
from twostroke.protocol.block_hash import BlockHash
from twostroke.protocol.kv_layout import NO_BLOCK, KVGroups


@dataclass(eq=False, slots=True)
class HostObject:
    """KV of the rows from `first_row` up to `end_row` of one prefix, as far as it is in memory."""

    name: bytes
    first_row: int
    end_row: int
    # Of each group that is here, the first of its rows, and their blocks up to the end.
    blocks: dict[int, tuple[int, list[int]]] = field(default_factory=dict)
    pins: int = 0


class HostTier:
    """Blocks of one store in host memory, and the objects in them."""

    def __init__(self, store: HostStore):
        self.store = store
        self.groups: KVGroups = store.layout.groups
        self.block_bytes = store.layout.block_bytes * self.groups.num_tensors
        self._tensors = [store.layer_bytes(tensor) for tensor in range(self.groups.num_tensors)]
        self._free = list(range(store.num_blocks - 1, -1, -1))
        self._objects: OrderedDict[bytes, HostObject] = OrderedDict()  # the first is evicted next

    @property
    def num_bytes(self) -> int:
        """Bytes of all blocks that have an owner."""
        return (self.store.num_blocks - len(self._free)) * self.block_bytes

    @property
    def max_bytes(self) -> int:
        """Bytes of all blocks."""
        return self.store.num_blocks * self.block_bytes

    @property
    def num_pinned(self) -> int:
        """Objects that somebody reads or writes: 0 when idle."""
        return sum(one.pins > 0 for one in self._objects.values())

    def __contains__(self, name: bytes) -> bool:
        return name in self._objects

    def get(self, name: bytes) -> HostObject | None:
        """Return the object, which is evicted last from now on; None where it is not here."""
        one = self._objects.get(name)
        if one is not None:
            self._objects.move_to_end(name)
        return one

    def add(self, one: HostObject) -> HostObject:
        """Keep the object; return it, or the one of its name that is here already, with the new one's groups."""
        known = self._objects.setdefault(one.name, one)
        if known is not one:
            for group, (first_row, block_ids) in one.blocks.items():
                if group in known.blocks:
                    self._free.extend(block_ids)
                else:
                    known.blocks[group] = first_row, block_ids
        self._objects.move_to_end(one.name)
        return known

    def allocate(self, count: int) -> list[int] | None:
        """Return so many blocks, which are the caller's; evict unpinned objects as needed. None: there are too few."""
        if len(self._free) < count:
            missing, victims = count - len(self._free), list[bytes]()
            for name, one in self._objects.items():
                if missing <= 0:
                    break
                if not one.pins:
                    victims.append(name)
                    missing -= sum(len(ids) for _, ids in one.blocks.values())
            if missing > 0:
                return None
            for name in victims:
                self.discard(name)
        taken = self._free[-count:] if count else []
        del self._free[len(self._free) - count :]
        return taken[::-1]

    def free(self, one: HostObject) -> None:
        """Give back the blocks of an object that is not kept."""
        for group in list(one.blocks):
            self.give_back(one, group)

    def give_back(self, one: HostObject, group: int) -> None:
        """Give back an object's blocks of one group. Harmless where it has none."""
        _, block_ids = one.blocks.pop(group, (0, []))
        self._free.extend(reversed(block_ids))

    def discard(self, name: bytes) -> None:
        """Forget an unpinned object. Harmless where it is not here, or pinned."""
        one = self._objects.get(name)
        if one is not None and not one.pins:
            del self._objects[name]
            self.free(one)

    def check_integrity(self) -> None:
        """Recount all blocks. Raises AssertionError where one is missing or has two owners, while nothing is under way.

        O(number of blocks): for idle tiers.
        """
        held = [block_id for one in self._objects.values() for _, ids in one.blocks.values() for block_id in ids]
        found = sorted([*self._free, *held])
        assert found == list(range(self.store.num_blocks)), f"{len(found)} blocks of {self.store.num_blocks} are known"
        assert not self.num_pinned, f"{self.num_pinned} objects are pinned"

    def buffers(self, group: int, block_ids: Sequence[int]) -> list[memoryview]:
        """Return the memory of a group's blocks: tensor by tensor, and block by block within each.

        Adjacent blocks are one view. Tensors that the group leaves alone hold other objects' bytes, and are left out.
        """
        size = self.store.layout.block_bytes
        tensors = [self._tensors[tensor] for tensor in self.groups.tensors_of_group[group]]
        return [tensor[first * size : end * size] for tensor in tensors for first, end in adjacent_runs(block_ids)]

    def table(self, objects: Sequence[HostObject]) -> list[int]:
        """Return the block table of a prefix that ends with these objects, one after the other; NO_BLOCK elsewhere."""
        count = self.groups.count
        table = [NO_BLOCK] * (objects[-1].end_row * count)
        for one in objects:
            for group, (first_row, block_ids) in one.blocks.items():
                for row, block_id in enumerate(block_ids, first_row):
                    table[row * count + group] = block_id
        return table


@dataclass(frozen=True)
class PrefixObjects:
    """Names and memory of the objects of one model."""

    digest: bytes  # KVIdentity.digest
    rows_each: int
    host: HostTier

    def refs(self, hashes: Sequence[BlockHash], client: bytes) -> list[ObjectRef]:
        """Return the whole objects of a prefix, in order."""
        tenant, rows = tenant_digest(client), self.rows_each
        refs: list[ObjectRef] = []
        parent = b""
        for first in range(0, len(hashes) - rows + 1, rows):
            own = b"".join(hashes[first : first + rows])
            key = rows_key(self.digest, tenant, self.host.store.layout, own)
            refs.append(ObjectRef(key, ObjectRows(first, own, parent)))
            parent = key.name
        return refs

    def lacks(self, one: HostObject, end_row: int) -> bool:
        """Return True where an object lacks rows of windows that the token after `end_row` attends to."""
        for group in self.host.groups.windowed:
            first = max(one.first_row, self._first_kept(group, end_row))
            if first < one.end_row and (group not in one.blocks or one.blocks[group][0] > first):
                return True
        return False

    def _first_kept(self, group: int, end_row: int) -> int:
        size = self.host.store.layout.block_size
        return self.host.groups.first_kept(group, end_row * size) // size

    def kept_rows(self, ref: ObjectRef, groups: Iterable[int]) -> dict[int, int]:
        """Return by group the first row that an object keeps of it; not those of which it keeps none."""
        rows = {group: max(ref.first_row, self._first_kept(group, ref.end_row)) for group in groups}
        return {group: first for group, first in rows.items() if first < ref.end_row}

    def room_for(self, ref: ObjectRef, first_rows: Mapping[int, int]) -> HostObject | None:
        """Return an object with memory for these groups' rows, from their first ones on; None: there is too little."""
        block_ids = self.host.allocate(sum(ref.end_row - first for first in first_rows.values()))
        if block_ids is None:
            return None
        one = HostObject(ref.name, ref.first_row, ref.end_row)
        for group, first in first_rows.items():
            count = ref.end_row - first
            one.blocks[group] = first, block_ids[:count]
            del block_ids[:count]
        return one

    def section(self, one: HostObject, group: int) -> SectionData:
        """Return the memory of an object's group, to be filled or written."""
        first, block_ids = one.blocks[group]
        return SectionData(group, first, len(block_ids), self.host.buffers(group, block_ids))
