"""The grid of steps that `bench costs` runs, and how it judges."""

import pytest

from twostroke.benchmarks.costs import Judged, Point, error_at, make_grid
from twostroke.worker.step_costs import StepContent


def test_half_of_each_kind_of_step_is_held_out_and_no_block_has_two_owners() -> None:
    grid = make_grid()
    for kind in ("prompts", "decodes", "mixed"):
        held_out = [point.is_held_out for point in grid if point.kind == kind]
        assert abs(2 * sum(held_out) - len(held_out)) <= 1
    for point in grid:
        blocks = [block for one in point.batch for block in one.block_ids]
        assert len(blocks) == len(set(blocks)), point.name
        for one in point.batch:
            assert len(one.block_ids) * 16 >= one.start + len(one.token_ids)


def test_steps_contain_what_their_names_say() -> None:
    contents = {point.name: StepContent.of(point.batch) for point in make_grid()}
    assert contents["128 tokens after 256"] == StepContent(128, 128 * (256 + 64), 0, 256)
    assert contents["8 rows of 512"] == StepContent(0, 0.0, 8, 8 * 513)
    mixed = contents["32 tokens and 8 rows"]
    assert (mixed.prompt_tokens, mixed.rows) == (32, 8)


def test_an_error_is_as_bad_above_as_below() -> None:
    point = Point("prompts", "", (), is_held_out=True)
    judged = [Judged(point, 1.0, ratio) for ratio in (1.0, 0.9, 1.2, 0.7, 1.01)]
    assert error_at(judged, 0.5) == pytest.approx(0.1)
    assert error_at(judged, 0.9) == pytest.approx(0.3)
    with pytest.raises(ValueError, match="nothing"):
        error_at([], 0.5)
