"""A block pool against a plain model of it, and the changes of its names against before and after."""

import math
from collections import Counter
from dataclasses import dataclass

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from twostroke.protocol.block_hash import BlockChanges, BlockHash, NameChanges
from twostroke.protocol.kv_layout import NO_BLOCK
from twostroke.worker.scheduling.block_pool import CLIENT_SHARE, TOTAL_SHARE, BlockPool, BlockPoolCorrupted, OutOfBlocks


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
        lambda pool: pool._references.__setitem__(4, 1),
        lambda pool: pool._free.append(pool._free[0]),
        lambda pool: pool._free.pop(),
        lambda pool: pool._cached.clear(),
        lambda pool: pool._by_name[0].clear(),
        lambda pool: pool._by_name[0].__setitem__(name(9), 0),
        lambda pool: pool._names.__setitem__(4, name(0)),
        lambda pool: pool._names.__setitem__(pool._free[0], name(5)),
        lambda pool: pool._tails.__setitem__(pool._free[0], name(5)),
        lambda pool: pool._by_tail.__setitem__(name(5), 0),
        lambda pool: pool._kept.clear(),
        lambda pool: pool._wishes.clear(),
        lambda pool: pool._wishes.__setitem__(pool._free[0], pool._wishes[3]),
        lambda pool: pool._retention._by_client.clear(),
        lambda pool: pool._retention._by_wish.clear(),
        lambda pool: pool._retention._by_length.clear(),
        lambda pool: pool._by_name[0].pop(pool._names.__getitem__(3), pool._names.__setitem__(3, None)),
        lambda pool: setattr(pool._retention, "_most_of_client", 0),
        lambda pool: setattr(pool._retention, "_most", 0),
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
    (kept,) = pool.allocate(1)
    pool.publish(kept, name(kept))
    pool.retain([kept], b"client", 300.0)
    pool.release([kept])
    assert (kept, *pool._kept) == (3, 3)
    pool.check_integrity()
    damage(pool)
    with pytest.raises(BlockPoolCorrupted):
        pool.check_integrity()


@dataclass(frozen=True)
class Kept:
    """A block that is kept in the model."""

    block: int
    released_at: float
    client: bytes
    keep_s: float
    wish: int

    @property
    def until(self) -> float:
        return self.released_at + self.keep_s


class PoolAgainstModel(RuleBasedStateMachine):
    """Random operations of several holders, against a model that keeps everything in plain lists."""

    NUM_BLOCKS = 7

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0
        self.pool = BlockPool(self.NUM_BLOCKS, 4, clock=lambda: self.now)
        self.tables: list[list[int]] = []  # each holder's blocks
        self.names: dict[BlockHash, int] = {}
        self.tails: dict[BlockHash, int] = {}
        self.released: list[tuple[int, float]] = []  # ordinary cached blocks, and when they were released, in order
        self.kept: list[Kept] = []  # in the order of their release
        self.wishes: dict[int, tuple[bytes, float, int]] = {}  # client, seconds and number, of owned blocks
        self.num_wishes = 0

    def counts(self) -> Counter[int]:
        return Counter(block for table in self.tables for block in table)

    def drop(self, table: list[int]) -> None:
        """Release a table in the model."""
        counts = self.counts()
        free = [block for block in reversed(table) if counts[block] == 0]
        named = [block for block in free if block in self.names.values()]
        self.released += [(block, self.now) for block in named if block not in self.wishes]
        for block in free:
            if block not in named and block in self.tails.values():
                self.released.insert(0, (block, -1.0))
        for block in free:
            wish = self.wishes.pop(block, None)
            if wish is not None and block in named:
                self.keep(Kept(block, self.now, *wish))

    def keep(self, kept: Kept) -> None:
        """Keep a block in the model, within the shares."""
        self.kept.append(kept)
        by_client = Counter(one.client for one in self.kept)
        largest = max(by_client, key=lambda client: (by_client[client], client))
        of_wish = [one for one in self.kept if one.wish == kept.wish]
        of_client = [one for one in self.kept if one.client == kept.client]
        is_large = len(of_wish) > math.ceil(int(CLIENT_SHARE * self.NUM_BLOCKS) / 2)
        for share, num_blocks, victims in (
            (CLIENT_SHARE, len(of_client), of_wish if is_large else of_client),
            (TOTAL_SHARE, len(self.kept), [one for one in self.kept if one.client == largest]),
        ):
            if num_blocks > share * self.NUM_BLOCKS:
                first = victims[0]
                self.released.append((first.block, self.now))
                self.kept.remove(first)
                return

    def may_evict(self) -> list[int]:
        """Return the blocks of which one is evicted next: several where they are as old as each other."""
        expired = [one for one in self.kept if one.until <= self.now]
        oldest = min((one.released_at for one in expired), default=self.now + 1)
        if self.released and self.released[0][1] <= oldest:
            return [self.released[0][0]]
        if expired:
            return [one.block for one in expired if one.released_at == oldest]
        first = min(one.until for one in self.kept)
        return [one.block for one in self.kept if one.until == first]

    def forget(self, block: int) -> None:
        """Take an unowned block off the model's order of eviction."""
        self.released = [one for one in self.released if one[0] != block]
        self.kept = [one for one in self.kept if one.block != block]

    def revive(self, blocks: list[int]) -> None:
        """Give cached blocks a reference in the model."""
        for one in list(self.kept):
            if one.block in blocks and self.now < one.until:
                self.wishes[one.block] = one.client, one.keep_s, one.wish
        for block in blocks:
            self.forget(block)

    @rule(seconds=st.sampled_from((1.0, 5.0)))
    def wait(self, seconds: float) -> None:
        self.now += seconds

    @precondition(lambda self: self.counts())
    @rule(data=st.data(), client=st.sampled_from((b"a", b"b", b"c", b"d")), keep_s=st.sampled_from((2.0, 4.0, 20.0)))
    def retain(self, data: st.DataObject, client: bytes, keep_s: float) -> None:
        self.wish(data.draw(st.lists(st.sampled_from(sorted(self.counts())), unique=True, min_size=1)), client, keep_s)

    @rule(first=st.integers(0, 20), count=st.integers(1, 4), client=st.sampled_from((b"a", b"b", b"c")), data=st.data())
    def serve(self, first: int, count: int, client: bytes, data: st.DataObject) -> None:
        """Serve a prompt of so many blocks, from its beginning to its end."""
        if count > self.NUM_BLOCKS - len(self.counts()):
            return
        self.allocate(count)
        table = self.tables.pop()
        for number, block in enumerate(table, first):
            self.pool.publish(block, name(number))
            self.names.setdefault(name(number), block)
        if keep_s := data.draw(st.sampled_from((0.0, 2.0, 4.0, 20.0))):
            self.wish(table, client, keep_s)
        self.pool.release(table)
        self.drop(table)

    def wish(self, blocks: list[int], client: bytes, keep_s: float) -> None:
        """Have owned blocks kept."""
        self.pool.retain([NO_BLOCK, *blocks], client, keep_s)
        for block in blocks:
            if self.wishes.get(block, (b"", 0.0, 0))[1] <= keep_s:
                self.wishes[block] = client, keep_s, self.num_wishes
        self.num_wishes += 1

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
        num_free = unowned - len(self.released) - len(self.kept)
        evicted = blocks[num_free:]
        for block in evicted:
            assert block in self.may_evict()
            self.forget(block)
        assert not set(blocks[:num_free]) & ({block for block, _ in self.released} | {one.block for one in self.kept})
        self.names = {key: block for key, block in self.names.items() if block not in evicted}
        self.tails = {key: block for key, block in self.tails.items() if block not in evicted}
        self.tables.append(blocks)

    @rule(chain=st.lists(st.integers(0, 7), max_size=4, unique=True))
    def match(self, chain: list[int]) -> None:
        expected = []
        for number in chain:
            if name(number) not in self.names:
                break
            expected.append(self.names[name(number)])
        assert self.pool.lookup([name(number) for number in chain]) == len(expected)
        assert self.pool.match([name(number) for number in chain]) == expected
        self.revive(expected)
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
            self.revive([block])
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
        with pytest.raises(ValueError, match="has no owner"):
            self.pool.retain([*self.counts(), stranger], b"a", 1.0)

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
        unowned = [*(block for block, _ in self.released), *(one.block for one in self.kept)]
        assert sorted(block for block in known if block not in counts) == sorted(unowned)
        assert list(self.pool._kept) == [one.block for one in self.kept]

    def teardown(self) -> None:
        for table in self.tables:
            self.pool.release(table)
        assert self.pool.owned_blocks == 0
        self.pool.check_integrity()


class LargePoolAgainstModel(PoolAgainstModel):
    """The same with more blocks, so that a client has several kept."""

    NUM_BLOCKS = 17


TestLargePoolAgainstModel = LargePoolAgainstModel.TestCase
TestLargePoolAgainstModel.settings = settings(max_examples=100, stateful_step_count=60, deadline=None, derandomize=True)
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
    monkeypatch.setattr("twostroke.protocol.block_hash.MAX_CHANGES", 3)
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


@pytest.mark.parametrize("used_at", [1.0, 2.0])
def test_a_use_renews_a_wish_whose_time_has_not_run_out(used_at: float) -> None:
    now = 0.0
    pool = BlockPool(8, 4, clock=lambda: now)
    (block,) = pool.allocate(1)
    pool.publish(block, name(0))
    pool.retain([block], b"client", 2.0)
    pool.release([block])
    now = used_at
    pool.release(pool.match([name(0)]))
    now = 2.5
    for number in range(1, 30):
        blocks = pool.allocate(1)
        pool.publish(blocks[0], name(number))
        pool.release(blocks)
    assert pool.lookup([name(0)]) == (used_at < 2.0)
    pool.check_integrity()
