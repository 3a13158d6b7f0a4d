"""Segments of decodes' contexts: every key once, and no program idle while another has much left to do."""

import itertools
import random
from collections import defaultdict
from collections.abc import Sequence
from typing import NamedTuple

import pytest
import torch
import triton
import triton.language as tl

from twostroke.model.cuda.kernels.launch import H100
from twostroke.model.cuda.kernels.segments import SplitConfig, part_of, segment_at, split_config
from twostroke.protocol.kv_layout import first_seen

pytestmark = pytest.mark.usefixtures("interpreter")
BLOCK_N = 64


class Segment(NamedTuple):
    row: int
    program: int
    begin: int
    end: int
    first_program: int
    of_row: int

    @property
    def steps(self) -> int:
        return -(-(self.end - self.begin) // BLOCK_N)


@triton.jit
def list_kernel(context_lens, num_rows, programs, found, count_out, WINDOW: tl.constexpr, BLOCK_N: tl.constexpr):  # type: ignore[no-untyped-def]
    """Does the bookkeeping of the attending kernels for their own parts, of all parts in one program."""
    count = 0
    for program in range(programs):
        share, first_row, end_row, row_start = part_of(context_lens, num_rows, program, programs, WINDOW, BLOCK_N)
        for row in range(first_row, end_row):
            context_len = tl.load(context_lens + row)
            begin, end, first_program, segments, steps = segment_at(
                context_len, row_start, program, share, WINDOW, BLOCK_N
            )
            row_start += steps
            entry = found + 6 * count
            tl.store(entry, row)
            tl.store(entry + 1, program)
            tl.store(entry + 2, begin)
            tl.store(entry + 3, end)
            tl.store(entry + 4, first_program)
            tl.store(entry + 5, segments)
            count += 1
    tl.store(count_out, count)


def segments_for(contexts: Sequence[int], programs: int, window: int = 0) -> list[Segment]:
    found, count = torch.full((len(contexts) + programs, 6), -1, dtype=torch.int32), torch.zeros(1, dtype=torch.int32)
    lens = torch.tensor(contexts, dtype=torch.int32)
    list_kernel[(1,)](lens, len(contexts), programs, found, count, WINDOW=window, BLOCK_N=BLOCK_N)
    return [Segment(*entry) for entry in found[: int(count)].tolist()]


def random_contexts(seed: int) -> tuple[list[int], int]:
    draw = random.Random(seed)
    rows = draw.choice((1, 2, 7, 40, 257))
    longest = draw.choice((1, 64, 130, 2000, 131072))
    contexts = [min(longest, int(draw.paretovariate(0.7) * 20) * draw.randrange(2 + seed % 3)) for _ in range(rows)]
    return contexts, draw.choice((1, 4, 33))


@pytest.mark.parametrize("window", [0, 100, 1024, -100, -1024])
@pytest.mark.parametrize("seed", range(8))
def test_every_key_that_is_seen_is_in_one_segment_and_no_two_have_one_place(seed: int, window: int) -> None:
    contexts, programs = random_contexts(seed)
    seen: dict[int, list[Segment]] = defaultdict(list)
    for segment in segments_for(contexts, programs, window):
        seen[segment.row].append(segment)
    places = [segment.row + segment.program for own in seen.values() for segment in own]
    assert len(set(places)) == len(places), "room for partial results is for rows + programs"
    for row, context in enumerate(contexts):
        own = seen[row]
        first = first_seen(window, max(0, context - 1)) // BLOCK_N * BLOCK_N
        assert (own[0].begin, own[-1].end) == (first, context)
        assert all(
            one.end == other.begin and one.program + 1 == other.program for one, other in itertools.pairwise(own)
        )
        assert all(one.begin < one.end for one in own) or (context == 0 and len(own) == 1)
        assert {(one.first_program, one.of_row) for one in own} == {(own[0].program, len(own))}, (
            "what the merge is told"
        )


def busiest(contexts: Sequence[int], tiles: int = 8, window: int = 0) -> float:
    """Steps of an H100's busiest program, over an equal share of all."""
    config = split_config(H100, tiles, max(contexts), BLOCK_N)
    programs = config.programs_for(len(contexts))
    steps = [0] * programs
    for segment in segments_for(contexts, programs, window):
        steps[segment.program] += segment.steps
    return max(steps) * config.programs / sum(steps)


@pytest.mark.parametrize(
    ("contexts", "tiles"),
    [
        ([131072], 8),
        ([131072], 1),
        ([16384] * 8, 8),
        ([16384] * 40, 8),
        ([1024] * 64, 8),
        ([4096] * 150, 8),
        ([131072, 65536, 4096, 128], 8),
        ([100 + 200 * row for row in range(80)], 8),
        ([1024] * 31 + [131072] + [1024] * 32, 8),
        ([1024] * 63 + [131072], 8),
        ([random.Random(row).randrange(1, 9000) for row in range(256)], 8),
    ],
    ids=lambda value: f"{len(value)} x {value[0]}" if isinstance(value, list) else str(value),
)
def test_all_programs_read_about_as_much_whatever_the_lengths(contexts: list[int], tiles: int) -> None:
    assert busiest(contexts, tiles) <= 1.05


def test_rows_that_programs_divide_evenly_are_not_split() -> None:
    assert {segment.of_row for segment in segments_for([16384] * 33, 33)} == {1}
    assert {segment.of_row for segment in segments_for([16384] * 66, 33)} == {1}


def test_programs_have_two_steps_or_more_and_windows_are_split_by_their_own_keys() -> None:
    assert len(segments_for([1024], 33)) == 8
    assert len(segments_for([100], 33)) == 1
    assert len(segments_for([131072], 33, window=1024)) == 8


@pytest.mark.parametrize("tiles", [1, 2, 8, 10, 40, 100, 131, 200])
def test_tiles_that_do_not_divide_the_gpu_leave_little_of_it_idle(tiles: int) -> None:
    programs = tiles * split_config(H100, tiles, 131072, BLOCK_N).programs
    assert programs / (-(-programs // 264) * 264) >= 0.92


def test_room_and_launches_are_known_from_shapes() -> None:
    config = split_config(H100, 8, 131072, BLOCK_N)
    assert (config.programs, config.programs_for(1), config.programs_for(64)) == (33, 33, 33)
    short = split_config(H100, 8, 64, BLOCK_N)  # a window that begins within a step reads two
    assert short.may_split
    assert [short.programs_for(rows) for rows in (1, 5, 64)] == [1, 5, 33]
    assert not SplitConfig(programs=1, most_steps=9).may_split
    assert not SplitConfig(programs=9, most_steps=1).may_split
    assert split_config(H100, 2000, 64, BLOCK_N).programs == 1
