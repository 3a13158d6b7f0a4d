"""Changes of a prefix cache, against the difference between what was in it before and after."""

from hypothesis import given
from hypothesis import strategies as st

from twostroke.protocol.blocks import NameChanges
from twostroke.worker.block_pool import BlockChanges, BlockPool

NUM_BLOCKS = 6
operations = st.lists(
    st.tuples(st.sampled_from(("cache", "take", "hold", "let go")), st.integers(0, 15), st.integers(1, 3)), max_size=60
)


def name(number: int) -> bytes:
    return number.to_bytes(16, "little")


def names_in(pool: BlockPool) -> set[bytes]:
    return set(pool.names(0, NUM_BLOCKS))


@given(operations)
def test_each_window_tells_the_difference_between_its_beginning_and_its_end(steps: list[tuple[str, int, int]]) -> None:
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


def test_what_came_and_went_within_a_window_is_not_told() -> None:
    changes = BlockChanges(lambda: None)
    changes.published(name(1))
    changes.evicted(name(1))
    assert changes.take() == NameChanges([], [])


def test_what_went_and_came_back_is_told_as_stored_since_it_may_lie_elsewhere() -> None:
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


def test_too_many_changes_are_not_kept() -> None:
    changes = BlockChanges(lambda: None, most=3)
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
