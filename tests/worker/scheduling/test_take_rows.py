"""Rows of the prefix cache that a worker sends to its tiers: references on them, and groups that lack some."""

import pytest

from twostroke.protocol.block_hash import BlockHash
from twostroke.protocol.kv_layout import NO_BLOCK, STATE_WINDOW, KVGroups, group_layers
from twostroke.worker.scheduling.block_pool import BlockPool

SIZE = 4
PLAIN, WINDOWS, STATES = group_layers((0, 0)), group_layers((0, 8)), group_layers((STATE_WINDOW, 0))


def names(first: int, end: int) -> list[BlockHash]:
    return [number.to_bytes(16, "little") for number in range(first, end)]


def pool_with(groups: KVGroups, rows: int, *, without: tuple[tuple[int, int], ...] = ()) -> BlockPool:
    """Return a pool that has so many rows cached, except for these (row, group)."""
    pool = BlockPool(rows * groups.count + 2, SIZE, groups)
    blocks = pool.allocate(rows * groups.count)
    for place, block_id in enumerate(blocks):
        row, group = divmod(place, groups.count)
        if (row, group) not in without:
            pool.publish(block_id, names(row, row + 1)[0], group)
    pool.release(blocks)
    pool.check_integrity()
    return pool


def taken(pool: BlockPool, first: int, end: int) -> tuple[list[int], frozenset[int]]:
    found = pool.take_rows(first, names(first, end))
    assert found is not None
    return found


def test_rows_of_the_middle_are_nobody_elses_until_they_are_released() -> None:
    pool = pool_with(PLAIN, 6)
    table, lacking = taken(pool, 2, 5)
    assert (len(table), lacking, pool.owned_blocks) == (3, frozenset(), 3)
    others = pool.allocate(pool.free_blocks)
    assert not set(others) & set(table), "their sender reads them"
    assert pool.take_rows(2, names(2, 5)) == (table, frozenset()), "several may send the same"
    assert {pool.references(block_id) for block_id in table} == {2}
    pool.release(table)
    pool.release(table)
    pool.release(others)
    assert pool.owned_blocks == 0
    assert taken(pool, 2, 5)[0] == table, "they stay cached"
    pool.release(table)
    pool.check_integrity()


def test_where_a_row_is_gone_nothing_is_taken() -> None:
    pool = pool_with(PLAIN, 6, without=((3, 0),))
    assert pool.take_rows(2, names(2, 5)) is None
    assert pool.owned_blocks == 0
    pool.release(taken(pool, 4, 6)[0])
    pool.check_integrity()


def test_of_a_window_only_what_the_token_behind_attends_to_is_taken() -> None:
    pool = pool_with(WINDOWS, 6)
    table, lacking = taken(pool, 1, 6)
    assert lacking == frozenset()
    # The token behind 24 others attends to 7 of them: to those from 17 on, in the rows 4 and 5.
    assert [block_id == NO_BLOCK for block_id in table[1::2]] == [True, True, True, False, False]
    assert NO_BLOCK not in table[::2]
    assert pool.owned_blocks == 7
    pool.release(table)
    pool.check_integrity()


@pytest.mark.parametrize("row", [4, 5])
def test_a_window_that_lacks_a_row_is_told_and_left_out(row: int) -> None:
    pool = pool_with(WINDOWS, 6, without=((row, 1),))
    table, lacking = taken(pool, 1, 6)
    assert (lacking, set(table[1::2])) == (frozenset({1}), {NO_BLOCK})
    assert pool.owned_blocks == 5
    pool.release(table)
    pool.check_integrity()


def test_a_window_may_lack_what_it_has_left_behind() -> None:
    pool = pool_with(WINDOWS, 6, without=((1, 1), (2, 1), (3, 1)))
    table, lacking = taken(pool, 1, 6)
    assert lacking == frozenset()
    pool.release(table)


def test_a_state_is_taken_of_the_last_row_alone() -> None:
    pool = pool_with(STATES, 4)
    state = STATES.windows.index(STATE_WINDOW)
    table, lacking = taken(pool, 0, 4)
    assert lacking == frozenset()
    assert [block_id == NO_BLOCK for block_id in table[state::2]] == [True, True, True, False]
    pool.release(table)
    pool.check_integrity()


def test_two_senders_of_a_window_count_as_two_holders_of_its_blocks() -> None:
    pool = pool_with(WINDOWS, 6)
    free = pool.free_blocks
    tables = [taken(pool, 1, 6)[0] for _ in range(3)]
    assert pool.free_blocks == free - 7 - 2 * 2
    for table in tables:
        pool.release(table)
    assert pool.free_blocks == free
    pool.check_integrity()
