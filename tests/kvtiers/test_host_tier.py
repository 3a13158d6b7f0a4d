"""The host tier against a plain model of it: each block of memory has one owner, and what is in use stays."""

from collections import OrderedDict

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from tests.kvtiers.rig import PLAIN, WINDOWS
from twostroke.kvtiers.host_tier import HostObject, HostTier
from twostroke.protocol.kv_layout import NO_BLOCK, KVLayout
from twostroke.simulator.memory_store import FakeStore

UNEVEN = KVLayout("uneven", "bfloat16", 5, 1, 4, 4, windows=(0, 8, 8, 8, 0))
"""Two layers keep all tokens and three a window, so the last group has one layer of two."""


def name(number: int) -> bytes:
    return bytes([number]) * 32


def tier_of(num_blocks: int, layout: KVLayout = PLAIN) -> HostTier:
    return HostTier(FakeStore(layout, num_blocks=num_blocks))


def new(tier: HostTier, number: int, *, rows: int = 2, group: int = 0, first_row: int = 0) -> HostObject:
    """Return an object of so many rows with memory for one group, which is not kept yet."""
    blocks = tier.allocate(rows)
    assert blocks is not None
    return HostObject(name(number), first_row, first_row + rows, {group: (first_row, blocks)})


def block_ids(one: HostObject) -> list[int]:
    return [block_id for _, ids in one.blocks.values() for block_id in ids]


class TierAgainstModel(RuleBasedStateMachine):
    """Random operations of several readers and writers, against a model that keeps lists of block ids."""

    NUM_BLOCKS = 7

    def __init__(self) -> None:
        super().__init__()
        self.tier = tier_of(self.NUM_BLOCKS, WINDOWS)
        self.kept: OrderedDict[bytes, HostObject] = OrderedDict()  # the first is evicted next
        self.owned: dict[bytes, dict[int, list[int]]] = {}  # the blocks of kept objects, by group
        self.pins: dict[bytes, int] = {}
        self.own: list[HostObject] = []  # the caller's: allocated and not kept
        self.taken: dict[int, list[int]] = {}  # by place in `own`

    def free_blocks(self) -> int:
        kept = sum(len(ids) for groups in self.owned.values() for ids in groups.values())
        return self.NUM_BLOCKS - kept - sum(len(block_ids(one)) for one in self.own)

    @rule(number=st.integers(0, 4), group=st.integers(0, 1), rows=st.integers(0, 4))
    def allocate(self, number: int, group: int, rows: int) -> None:
        unpinned = [key for key in self.kept if not self.pins[key]]
        evicted = []
        missing = rows - self.free_blocks()
        while missing > 0 and unpinned:
            evicted.append(unpinned.pop(0))
            missing -= sum(map(len, self.owned[evicted[-1]].values()))
        blocks = self.tier.allocate(rows)
        assert (blocks is None) == (missing > 0)
        for key in evicted if blocks is not None else ():
            assert key not in self.tier
            assert not self.kept.pop(key).blocks
            del self.owned[key], self.pins[key]
        if blocks is not None:
            assert len(set(blocks)) == len(blocks) == rows
            self.own.append(HostObject(name(number), 0, rows, {group: (0, list(blocks))}))

    @precondition(lambda self: self.own)
    @rule(data=st.data())
    def add(self, data: st.DataObject) -> None:
        one = self.own.pop(data.draw(st.integers(0, len(self.own) - 1)))
        kept = self.tier.add(one)
        known = self.kept.setdefault(one.name, one)
        assert kept is known
        groups = self.owned.setdefault(one.name, {})
        self.pins.setdefault(one.name, 0)
        for group, (_, ids) in one.blocks.items():
            groups.setdefault(group, ids)
        self.kept.move_to_end(one.name)

    @precondition(lambda self: self.own)
    @rule(data=st.data(), by_group=st.booleans())
    def give_back_what_is_not_kept(self, data: st.DataObject, by_group: bool) -> None:
        one = self.own.pop(data.draw(st.integers(0, len(self.own) - 1)))
        if by_group:
            for group in (0, 1):
                self.tier.give_back(one, group)
        else:
            self.tier.free(one)
        assert not one.blocks

    @rule(number=st.integers(0, 4))
    def get(self, number: int) -> None:
        assert self.tier.get(name(number)) is self.kept.get(name(number))
        if name(number) in self.kept:
            self.kept.move_to_end(name(number))

    @rule(number=st.integers(0, 4), by=st.sampled_from([1, -1]))
    def pin(self, number: int, by: int) -> None:
        one = self.kept.get(name(number))
        if one is not None and one.pins + by >= 0:
            one.pins += by
            self.pins[name(number)] += by

    @rule(number=st.integers(0, 4))
    def discard(self, number: int) -> None:
        self.tier.discard(name(number))
        if not self.pins.get(name(number), 1):
            assert not self.kept.pop(name(number)).blocks
            del self.owned[name(number)], self.pins[name(number)]

    @invariant()
    def every_block_has_one_owner(self) -> None:
        for key, groups in self.owned.items():
            assert {group: ids for group, (_, ids) in self.kept[key].blocks.items()} == groups
        held = [block_id for one in (*self.kept.values(), *self.own) for block_id in block_ids(one)]
        assert len(held) == len(set(held))
        assert self.tier.num_bytes == len(held) * self.tier.block_bytes
        assert all((key in self.tier) == (key in self.kept) for key in map(name, range(5)))

    def teardown(self) -> None:
        for one in self.kept.values():
            one.pins = 0
        for one in self.own:
            self.tier.free(one)
        self.tier.check_integrity()


TestTierAgainstModel = TierAgainstModel.TestCase
TestTierAgainstModel.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)


@pytest.mark.parametrize("fault", ["a block is lost", "a block has two owners", "an object is pinned"])
def test_damaged_books_are_noticed(fault: str) -> None:
    tier = tier_of(6)
    one = tier.add(new(tier, 1))
    tier.check_integrity()
    if fault == "a block is lost":
        one.blocks[0][1].pop()
    elif fault == "a block has two owners":
        one.blocks[0][1][0] = one.blocks[0][1][1]
    else:
        one.pins = 1
    with pytest.raises(AssertionError):
        tier.check_integrity()


def test_what_was_used_last_is_evicted_last() -> None:
    tier = tier_of(6)
    for number in range(3):
        tier.add(new(tier, number))
    assert tier.get(name(0)) is not None
    assert tier.allocate(2) is not None
    assert [name(number) in tier for number in range(3)] == [True, False, True]
    tier.add(HostObject(name(2), 0, 2))  # a second copy is a use too
    assert tier.allocate(2) is not None
    assert [name(number) in tier for number in range(3)] == [False, False, True]


def test_no_more_is_evicted_than_needed_and_nothing_that_is_pinned() -> None:
    tier = tier_of(6)
    objects = [tier.add(new(tier, number)) for number in range(3)]
    objects[0].pins += 1
    assert tier.allocate(1) is not None
    assert [name(number) in tier for number in range(3)] == [True, False, True]
    tier.discard(name(0))
    assert name(0) in tier, "somebody reads it"
    assert tier.allocate(4) is None
    assert objects[0].blocks, "too little memory takes nothing from a reader"
    assert tier.num_pinned == 1


def test_a_second_object_of_a_name_adds_the_groups_that_the_first_lacks() -> None:
    tier = tier_of(8, WINDOWS)
    first = tier.add(new(tier, 1, group=0))
    of_whole = list(first.blocks[0][1])
    second = new(tier, 1, group=0)
    second.blocks[1] = 1, tier.allocate(1) or []
    of_window = list(second.blocks[1][1])
    assert tier.add(second) is first
    assert first.blocks == {0: (0, of_whole), 1: (1, of_window)}
    assert tier.num_bytes == 3 * tier.block_bytes
    tier.check_integrity()


def test_a_table_has_the_rows_of_all_objects_and_none_before_or_beside_them() -> None:
    tier = tier_of(12, WINDOWS)
    before, after = (
        HostObject(name(1), 2, 4, {0: (2, [5, 6])}),
        HostObject(name(2), 4, 6, {0: (4, [7, 8]), 1: (5, [9])}),
    )
    none = NO_BLOCK
    assert tier.table([before, after]) == [none, none, none, none, 5, none, 6, none, 7, none, 8, 9]


def test_the_memory_of_a_group_is_that_of_its_own_layers_in_as_few_pieces_as_it_has_runs() -> None:
    tier = tier_of(10, UNEVEN)
    groups = tier.groups
    assert [len(tensors) for tensors in groups.tensors_of_group] == [2, 2, 1]
    size = UNEVEN.block_bytes
    for group, tensors in enumerate(groups.tensors_of_group):
        buffers = tier.buffers(group, [2, 3, 4, 8, 0, 1])
        assert [len(one) for one in buffers] == [3 * size, size, 2 * size] * len(tensors)
        for one in buffers:
            one[:] = bytes([group + 1]) * len(one)
        memory = [tier.store.layer_bytes(tensor) for tensor in range(groups.num_tensors)]
        written = {tensor for tensor in range(groups.num_tensors) if memory[tensor][8 * size] == group + 1}
        assert written == set(tensors), "other tensors hold other objects' bytes in these blocks"
        assert memory[0][5 * size] not in (1, 2, 3), "a block that was not asked for"
