"""How decodes' contexts are cut into segments: every key once, nobody idle while another has much left to do."""

import itertools
import random
from collections.abc import Sequence
from typing import NamedTuple

import pytest
import torch
import triton
import triton.language as tl

from twostroke.model.cuda.kernels.launch import H100
from twostroke.model.cuda.kernels.segments import (
    SplitConfig,
    find_segment,
    keys_of,
    plan_segments,
    segments_of,
    split_config,
    steps_of,
)

pytestmark = pytest.mark.usefixtures("interpreter")
BLOCK_N = 64


class Segment(NamedTuple):
    row: int
    begin: int
    end: int


@triton.jit
def list_kernel(context_lens, num_rows, places, found, count_out, WINDOW: tl.constexpr, BLOCK_N: tl.constexpr):  # type: ignore[no-untyped-def]
    """What the attending kernels do of their own segments, of all in one program."""
    wanted, count = plan_segments(context_lens, num_rows, places, WINDOW, BLOCK_N)
    tl.store(count_out, count)
    for entry in range(count):
        row, segment = find_segment(context_lens, num_rows, wanted, entry, WINDOW, BLOCK_N)
        context_len = tl.load(context_lens + row)
        _, steps = steps_of(context_len, WINDOW, BLOCK_N)
        begin, end = keys_of(context_len, segment, segments_of(steps, wanted), WINDOW, BLOCK_N)
        tl.store(found + 3 * entry, row)
        tl.store(found + 3 * entry + 1, begin)
        tl.store(found + 3 * entry + 2, end)


def segments_for(contexts: Sequence[int], places: int, window: int = 0) -> list[Segment]:
    config = SplitConfig(places, max(contexts) // BLOCK_N + 2)
    most = config.most_segments(len(contexts))
    found, count = torch.full((most, 3), -1, dtype=torch.int32), torch.zeros(1, dtype=torch.int32)
    lens = torch.tensor(contexts, dtype=torch.int32)
    list_kernel[(1,)](lens, len(contexts), places, found, count, WINDOW=window, BLOCK_N=BLOCK_N)
    assert int(count) <= most, "more than there is room for"
    return [Segment(*entry) for entry in found[: int(count)].tolist()]


def random_contexts(seed: int) -> tuple[list[int], int]:
    draw = random.Random(seed)
    rows = draw.choice((1, 2, 7, 40, 257))
    longest = draw.choice((1, 64, 130, 2000, 131072))
    contexts = [min(longest, int(draw.paretovariate(0.7) * 20) * draw.randrange(2 + seed % 3)) for _ in range(rows)]
    return contexts, draw.choice((1, 4, 33))


@pytest.mark.parametrize("window", [0, 100, 1024])
@pytest.mark.parametrize("seed", range(8))
def test_every_key_that_is_seen_is_in_one_segment_and_they_fit(seed: int, window: int) -> None:
    contexts, places = random_contexts(seed)
    found = segments_for(contexts, places, window)
    seen: list[list[Segment]] = [[] for _ in contexts]
    for segment in found:
        seen[segment.row].append(segment)
    assert [segment.row for segment in found] == sorted(segment.row for segment in found)
    for context, own in zip(contexts, seen, strict=True):
        first = max(0, context - window) // BLOCK_N * BLOCK_N if window else 0
        assert (own[0].begin, own[-1].end) == (first, context)
        assert all(one.end == other.begin for one, other in itertools.pairwise(own))
        assert all(one.begin < one.end for one in own) or context == 0
        lengths = [-(-(one.end - one.begin) // BLOCK_N) for one in own]
        assert max(lengths) <= min(lengths) + 1


def idle_share(contexts: Sequence[int], tiles: int = 8, window: int = 0) -> float:
    """Of an H100, while the busiest of its programs has something to do; each reads its segments in their order."""
    config = split_config(H100, tiles, max(contexts), BLOCK_N)
    programs = config.programs(len(contexts))
    steps = [0] * programs
    for entry, segment in enumerate(segments_for(contexts, config.places, window)):
        steps[entry % programs] += -(-(segment.end - segment.begin) // BLOCK_N)
    return 1 - sum(steps) / (config.places * max(steps))


@pytest.mark.parametrize("place", [0, 31, 63])
def test_one_long_context_among_many_is_read_by_all_of_the_gpu(place: int) -> None:
    contexts = [131072 if row == place else 1024 for row in range(64)]
    assert idle_share(contexts) < 0.12
    segments = segments_for(contexts, 33)
    assert sum(segment.row == place for segment in segments) >= 33
    assert len(segments) - sum(segment.row == place for segment in segments) == 63, "the short ones stay whole"


@pytest.mark.parametrize(
    ("contexts", "tiles", "most_idle"),
    [
        ([131072], 8, 0.02),
        ([131072], 1, 0.04),
        ([16384] * 8, 8, 0.04),
        ([16384] * 32, 8, 0.04),  # 256 programs of the 264 that fit
        ([16384] * 40, 8, 0.1),  # 320 would fill one wave and a fifth of a second
        ([1024] * 64, 8, 0.04),
        ([4096] * 150, 8, 0.1),
        ([131072, 65536, 4096, 128], 8, 0.05),
        ([100 + 200 * row for row in range(80)], 8, 0.25),
    ],
    ids=lambda value: f"{len(value)} x {value[0]}" if isinstance(value, list) else str(value),
)
def test_contexts_are_split_until_all_multiprocessors_are_about_equally_busy(
    contexts: list[int], tiles: int, most_idle: float
) -> None:
    assert idle_share(contexts, tiles) <= most_idle


@pytest.mark.parametrize(("contexts", "segments"), [([16384] * 32, 32), ([16384] * 64, 64)])
def test_rows_that_fill_the_gpu_by_themselves_are_not_split(contexts: list[int], segments: int) -> None:
    assert len(segments_for(contexts, 33)) == segments


def test_segments_have_two_steps_or_more_and_windows_are_split_by_their_own_keys() -> None:
    assert len(segments_for([1024], 33)) == 8
    assert len(segments_for([100], 33)) == 1
    assert len(segments_for([131072], 33, window=1024)) == 8


def test_room_and_launches_are_known_from_shapes() -> None:
    config = split_config(H100, 8, 131072, BLOCK_N)
    assert (config.places, config.programs(1), config.programs(64)) == (33, 33, 33)
    assert config.most_segments(64) == 64 + 4 * 33
    short = split_config(H100, 8, 100, BLOCK_N)
    assert short.may_split  # a window that begins within a step reads three
    assert not split_config(H100, 8, 64, BLOCK_N).may_split
    assert split_config(H100, 8, 64, BLOCK_N).most_segments(5) == split_config(H100, 8, 64, BLOCK_N).programs(5) == 5
    assert split_config(H100, 1000, 64, BLOCK_N).places == 1
