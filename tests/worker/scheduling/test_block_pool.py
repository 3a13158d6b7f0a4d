"""A block pool against a plain model of it, and the changes of its names against before and after."""

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from twostroke.protocol.blocks import BlockChanges, BlockHash, NameChanges
from twostroke.protocol.kv_layout import NO_BLOCK
from twostroke.worker.scheduling.block_pool import BlockPool, BlockPoolCorrupted, OutOfBlocks


def name(number: int) -> BlockHash:
    return number.to_bytes(16, "little")


@pytest.mark.parametrize(("num_blocks", "block_size"), [(0, 16), (-1, 16), (4, 0)])
def test_a_pool_without_room_is_refused(num_blocks: int, block_size: int) -> None:
    with pytest.raises(ValueError, match="a pool needs blocks"):
        BlockPool(num_blocks, block_size)


@pytest.mark.parametrize(
    "damage",
    [
        lambda pool: pool._references.__setitem__(0, -1),
        lambda pool: pool._references.__setitem__(0, 0),
        lambda pool: pool._references.__setitem__(3, 1),
        lambda pool: pool._free.append(pool._free[0]),
        lambda pool: pool._free.pop(),
        lambda pool: pool._cached.clear(),
        lambda pool: pool._by_name[0].clear(),
        lambda pool: pool._by_name[0].__setitem__(name(9), 0),
        lambda pool: pool._names.__setitem__(3, name(0)),
        lambda pool: pool._names.__setitem__(pool._free[0], name(5)),
        lambda pool: pool._tails.__setitem__(pool._free[0], name(5)),
        lambda pool: pool._by_tail.__setitem__(name(5), 0),
    ],
)
def test_damaged_books_are_noticed(damage) -> None:  # type: ignore[no-untyped-def]
    pool = BlockPool(6, 16)
    owned = pool.allocate(1)
    assert owned == [0]
    cached = pool.allocate(2)
    for block_id in cached:
        pool.publish(block_id, name(block_id))
    pool.release(cached)
    pool.check_integrity()
    damage(pool)
    with pytest.raises(BlockPoolCorrupted):
        pool.check_integrity()


class PoolAgainstModel(RuleBasedStateMachine):
    """Random operations of several holders, against a model that keeps everything in plain lists."""

    NUM_BLOCKS = 7

    def __init__(self) -> None:
        super().__init__()
        self.pool = BlockPool(self.NUM_BLOCKS, 4)
        self.tables: list[list[int]] = []  # each holder's blocks
        self.names: dict[BlockHash, int] = {}
        self.tails: dict[BlockHash, int] = {}
        self.released: list[int] = []  # unreferenced named blocks, the next to be evicted first

    def counts(self) -> Counter[int]:
        return Counter(block for table in self.tables for block in table)

    def drop(self, table: list[int]) -> None:
        """Release a table in the model."""
        counts = self.counts()
        for block in reversed(table):
            if counts[block] == 0 and block in self.names.values():
                self.released.append(block)
            elif counts[block] == 0 and block in self.tails.values():
                self.released.insert(0, block)

    @rule(count=st.integers(0, 4))
    def allocate(self, count: int) -> None:
        unowned = self.NUM_BLOCKS - len(self.counts())
        if count > unowned:
            with pytest.raises(OutOfBlocks):
                self.pool.allocate(count)
            return
        blocks = self.pool.allocate(count)
        assert len(set(blocks)) == count
        assert not set(blocks) & set(self.counts())
        evicted = self.released[: max(0, count - (unowned - len(self.released)))]
        assert [block for block in blocks if block in self.released] == evicted
        self.released = self.released[len(evicted) :]
        self.names = {key: block for key, block in self.names.items() if block not in evicted}
        self.tails = {key: block for key, block in self.tails.items() if block not in evicted}
        self.tables.append(blocks)

    @rule(chain=st.lists(st.integers(0, 5), max_size=4, unique=True))
    def match(self, chain: list[int]) -> None:
        expected = []
        for number in chain:
            if name(number) not in self.names:
                break
            expected.append(self.names[name(number)])
        assert self.pool.lookup([name(number) for number in chain]) == len(expected)
        assert self.pool.match([name(number) for number in chain]) == expected
        self.released = [block for block in self.released if block not in expected]
        self.tables.append(expected)

    @precondition(lambda self: self.tables)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        table = self.tables.pop(data.draw(st.integers(0, len(self.tables) - 1)))
        self.pool.release(table)
        self.drop(table)

    @precondition(lambda self: self.counts())
    @rule(data=st.data(), number=st.integers(0, 5))
    def publish(self, data: st.DataObject, number: int) -> None:
        block = data.draw(st.sampled_from(sorted(self.counts())))
        if block in self.names.values() and self.names.get(name(number)) != block:
            with pytest.raises(ValueError, match="already holds other tokens"):
                self.pool.publish(block, name(number))
            return
        self.pool.publish(block, name(number))
        self.names.setdefault(name(number), block)

    @precondition(lambda self: self.counts())
    @rule(data=st.data(), number=st.integers(0, 3))
    def publish_tail(self, data: st.DataObject, number: int) -> None:
        block = data.draw(st.sampled_from(sorted(self.counts())))
        self.pool.publish_tail(block, name(number))
        if block not in self.tails.values():
            self.tails.setdefault(name(number), block)

    @rule(number=st.integers(0, 3))
    def take_tail(self, number: int) -> None:
        block = self.pool.take_tail(name(number))
        assert block == self.tails.get(name(number))
        if block is not None:
            self.released = [other for other in self.released if other != block]
            self.tables.append([block])

    @precondition(lambda self: len(self.counts()) < self.NUM_BLOCKS)
    @rule(data=st.data())
    def refuse_strangers(self, data: st.DataObject) -> None:
        unowned = sorted(set(range(-2, self.NUM_BLOCKS + 1)) - {NO_BLOCK, *self.counts()})
        stranger = data.draw(st.sampled_from(unowned))
        with pytest.raises(ValueError, match="has no owner"):
            self.pool.release([*self.counts(), NO_BLOCK, stranger])
        with pytest.raises(ValueError, match="has no owner"):
            self.pool.publish(stranger, name(0))

    @precondition(lambda self: self.counts())
    @rule()
    def refuse_a_block_that_is_listed_twice(self) -> None:
        owned = [*self.counts()]
        with pytest.raises(ValueError, match="listed twice"):
            self.pool.release([*owned, owned[0]])

    @invariant()
    def books_agree(self) -> None:
        self.pool.check_integrity()
        counts = self.counts()
        assert [self.pool.references(block) for block in range(self.NUM_BLOCKS)] == [
            counts[block] for block in range(self.NUM_BLOCKS)
        ]
        assert self.pool.owned_blocks == len(counts)
        assert self.pool.free_blocks + self.pool.owned_blocks == self.pool.num_blocks
        named = [block for block in range(self.NUM_BLOCKS) if self.pool.names(block, block + 1)]
        assert named == sorted(self.names.values())
        known = {*named, *self.tails.values()}
        assert sorted(block for block in known if block not in counts) == sorted(self.released)

    def teardown(self) -> None:
        for table in self.tables:
            self.pool.release(table)
        assert self.pool.owned_blocks == 0
        self.pool.check_integrity()


TestPoolAgainstModel = PoolAgainstModel.TestCase
TestPoolAgainstModel.settings = settings(max_examples=100, stateful_step_count=40, deadline=None, derandomize=True)


NUM_BLOCKS = 6
operations = st.lists(
    st.tuples(st.sampled_from(("cache", "take", "hold", "let go")), st.integers(0, 15), st.integers(1, 3)), max_size=60
)


def names_in(pool: BlockPool) -> set[bytes]:
    return set(pool.names(0, NUM_BLOCKS))


@settings(deadline=None)
@given(operations)
def test_each_window_reports_the_difference_between_its_beginning_and_its_end(
    steps: list[tuple[str, int, int]],
) -> None:
    pool = BlockPool(NUM_BLOCKS, 4)
    pool.record_changes(lambda: None)
    known: set[bytes] = set()
    held: list[list[int]] = []
    for action, number, count in steps:
        match action:
            case "cache" if pool.free_blocks >= count:
                blocks = pool.allocate(count)
                for index, block in enumerate(blocks):
                    pool.publish(block, name(number + index))
                pool.release(blocks)
            case "hold":
                held.append(pool.match([name(number)]))
            case "let go" if held:
                pool.release(held.pop())
            case "take":
                changes = pool.take_changes()
                assert changes is not None
                assert len(changes.stored) == len(set(changes.stored))
                assert not set(changes.stored) & set(changes.removed)
                assert set(changes.removed) == known - names_in(pool)
                assert set(changes.stored) >= names_in(pool) - known
                assert set(changes.stored) <= names_in(pool)
                known = names_in(pool)


def test_a_name_that_left_and_returned_is_reported_as_stored() -> None:
    changes = BlockChanges(lambda: None)
    changes.evicted(name(1))
    changes.published(name(1))
    assert changes.take() == NameChanges([name(1)], [])
    changes.evicted(name(2))
    changes.published(name(2))
    changes.evicted(name(2))
    assert changes.take() == NameChanges([], [name(2)])


def test_the_beginning_of_each_window_is_announced_once() -> None:
    begun: list[int] = []
    changes = BlockChanges(lambda: begun.append(1))
    changes.published(name(1))
    changes.evicted(name(2))
    assert len(begun) == 1
    changes.take()
    assert len(begun) == 1
    changes.evicted(name(1))
    assert len(begun) == 2


def test_too_many_changes_are_not_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("twostroke.protocol.blocks.MOST_CHANGES", 3)
    changes = BlockChanges(lambda: None)
    for number in range(3):
        changes.published(name(number))
    changes.published(name(0))
    told = changes.take()
    assert told is not None
    assert set(told.stored) == {name(0), name(1), name(2)}
    for number in range(4):
        changes.evicted(name(number))
    assert changes.take() is None
    changes.evicted(name(9))
    assert changes.take() == NameChanges([], [name(9)])
