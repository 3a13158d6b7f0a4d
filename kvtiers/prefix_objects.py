"""The objects that a prefix has, and their places in host memory. Pure but for the memory itself.

An object holds `rows_each` rows of a prefix. Of a group with a window it keeps the rows to which the token behind the
object's own end attends. So a prefix may end with any object: what it needs of windows lies in that one and in those
before.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from twostroke.kvtiers.host_tier import HostObject, HostTier
from twostroke.kvtiers.identity import tenant_digest
from twostroke.kvtiers.objects import ObjectRows, SectionData, rows_key
from twostroke.kvtiers.storage_tier import ObjectRef
from twostroke.protocol.blocks import BlockHash


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
