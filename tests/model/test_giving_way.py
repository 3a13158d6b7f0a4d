"""Whose blocks go to one of a higher class."""

from dataclasses import dataclass

import pytest

from twostroke.protocol.requests import GenerateRequest, SamplingParams
from twostroke.worker.block_pool import BlockPool
from twostroke.worker.queue_order import who_gives_way
from twostroke.worker.sequence import SequenceState


@dataclass
class Holder:
    sequence: SequenceState


def holder(pool: BlockPool, num_blocks: int) -> Holder:
    sequence = SequenceState(GenerateRequest("", "", tuple(range(num_blocks)), 1, SamplingParams(), 1), 1)
    sequence.reserve(pool, num_blocks)
    return Holder(sequence)


@pytest.mark.parametrize(
    ("missing", "chosen"),
    [(1, [0]), (2, [0]), (3, [1]), (5, [0, 1]), (6, [2]), (10, [1, 2]), (13, [0, 1, 2]), (14, [])],
)
def test_no_more_give_way_than_it_takes_and_nobody_where_it_helps_nobody(missing: int, chosen: list[int]) -> None:
    pool = BlockPool(20, 1)
    holders = [holder(pool, 2), holder(pool, 3), holder(pool, 8)]
    assert who_gives_way(holders, missing, pool) == [holders[i] for i in chosen]


def test_blocks_that_others_hold_too_would_not_come_free() -> None:
    pool = BlockPool(20, 1)
    one = holder(pool, 3)
    pool.share(one.sequence.block_ids[:2])
    assert who_gives_way([one], 1, pool) == [one]
    assert who_gives_way([one], 2, pool) == []
