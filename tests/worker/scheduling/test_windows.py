"""Block tables of layers with windows: what is held, what is given back, what a prefix cache still covers."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from tests.worker.scheduling.scheduler_rig import Rig
from tests.worker.scheduling.test_sequence import request
from twostroke.kvtransfer.layout import ChunkPlan
from twostroke.protocol.block_hash import BlockHash
from twostroke.protocol.kv_layout import NO_BLOCK, KVGroups, group_layers, group_table
from twostroke.worker.scheduling.block_pool import BlockPool, OutOfBlocks
from twostroke.worker.scheduling.job import SequenceState

SIZE, STEP = 4, 8
GEMMA = group_layers((1024, 1024, 1024, 1024, 1024, 0) * 4 + (1024, 1024))
"""Groups like those of the 1B's 26 layers, whose window is 512."""


def test_layers_are_cut_into_groups_as_large_as_the_smaller_kind() -> None:
    assert GEMMA.windows == (0, *(1024,) * 6)
    assert GEMMA.num_tensors == 4
    places = list(zip(GEMMA.of_layer, GEMMA.tensor_of_layer, strict=True))
    assert len(set(places)) == 26
    assert [layer for layer, group in enumerate(GEMMA.of_layer) if group == 0] == [5, 11, 17, 23]
    assert [len(tensors) for tensors in GEMMA.tensors_of_group] == [4] * 6 + [2], "the last has fewer layers"
    assert group_layers((0, 0, 0)) == KVGroups((0,), (0, 0, 0), (0, 1, 2), ((0,),))
    assert group_layers((9, 9)) == KVGroups((9,), (0, 0), (0, 1), ((0,),))


@pytest.mark.parametrize("windows", [(0, 0), (9, 0), (0, 9, 9, 9, 0), (2, 2, 0, 9, 9, 9, 9), (-8, 0, 0)])
def test_the_tensors_of_a_group_are_those_that_its_layers_write_into(windows: tuple[int, ...]) -> None:
    groups = group_layers(windows)
    places = {(group, tensor) for group, tensors in enumerate(groups.tensors_of_group) for tensor in tensors}
    assert places == set(zip(groups.of_layer, groups.tensor_of_layer, strict=True))
    assert sum(map(len, groups.tensors_of_group)) == len(windows), "no two layers of a group share a tensor"
    assert all(list(tensors) == sorted(tensors) for tensors in groups.tensors_of_group)


@pytest.mark.parametrize("windows", [(0, 5), (7,), (0, 0, 3), (2, 2, 0, 30), (0, -8), (-7, 0, -7)])
def test_the_longest_request_is_the_one_that_just_fits(windows: tuple[int, ...]) -> None:
    groups = group_layers(windows)
    for num_blocks in range(1, 40):
        longest = groups.tokens_in(num_blocks, SIZE, STEP)
        assert groups.blocks_of(longest, SIZE, STEP) <= num_blocks
        if longest < 1 << 40:
            assert groups.blocks_of(longest + 1, SIZE, STEP) > num_blocks


def hold_prompt(groups: KVGroups, num_tokens: int, block_size: int, step: int) -> tuple[int, int]:
    """The most blocks that a prompt holds while it is computed, and those that it holds afterwards."""
    pool = BlockPool(groups.blocks_of(num_tokens, block_size, step), block_size, groups)
    sequence = SequenceState(request(num_tokens), block_size, groups, step)
    sequence.reserve(pool, num_tokens)
    most = pool.owned_blocks
    while sequence.num_uncomputed:
        size = min(step, sequence.num_uncomputed)
        sequence.step(size)
        sequence.computed(pool, sequence.num_computed + size)
        most = max(most, pool.owned_blocks)
    return most, pool.owned_blocks


def test_with_windows_a_quarter_of_the_bytes_is_enough_at_32k_tokens_in_memory_and_on_the_wire() -> None:
    num_tokens, block_size = 32_768, 16
    groups = group_layers(((1024,) * 5 + (0,)) * 4)
    whole = 24 * num_tokens
    most, held = hold_prompt(groups, num_tokens, block_size, 2048)
    assert held * groups.num_tensors * block_size / whole <= 0.20
    assert most * groups.num_tensors * block_size / whole <= 0.25
    plan = ChunkPlan(groups=groups, layers=range(24), num_tokens=num_tokens, num_ready_tokens=num_tokens)
    plan.begin(block_size, 0)
    sent = sum(run.num_units for run in iter(lambda: plan.next_runs(1 << 20), ()) for run in run) * block_size
    assert plan.all_taken
    assert sent / whole <= 0.20


def test_a_window_holds_no_more_than_itself_and_a_step() -> None:
    groups = group_layers((10, 0))
    most, held = hold_prompt(groups, 100, SIZE, STEP)
    assert most == 25 + groups.most_rows(1, SIZE, STEP) == 25 + 6
    assert held == 25 + 3  # of tokens 91 to 99, which the next one attends to


@pytest.mark.parametrize("size", [8, 10])  # whole blocks, and not
def test_a_chunk_holds_no_more_than_itself_and_a_step_and_goes_back_whole(size: int) -> None:
    groups = group_layers((-size, 0))
    assert groups.windows == (0, -size)
    most, held = hold_prompt(groups, 100, SIZE, STEP)
    assert most == 25 + groups.most_rows(1, SIZE, STEP) <= 25 + (size + STEP - 2) // SIZE + 2
    first = 100 // size * size
    assert held == 25 + 25 - first // SIZE
    _, at_end = hold_prompt(groups, 80, SIZE, STEP)
    assert at_end == 20, "the next token begins a chunk, and sees no token before it there"


def test_behind_a_chunk_a_prefix_needs_only_the_layers_that_keep_all() -> None:
    pool = BlockPool(60, SIZE, group_layers((0, -8)))
    _, hashes = named(pool, 80)
    table = pool.match(hashes)
    assert len(table) == 40
    assert NO_BLOCK not in group_table(table, 0, 2)
    assert set(group_table(table, 1, 2)) == {NO_BLOCK}
    pool.release(table)
    table = pool.match(hashes[:19])  # half of a chunk
    assert [block == NO_BLOCK for block in group_table(table, 1, 2)] == [True] * 18 + [False]
    pool.release(table)
    pool.check_integrity()


@pytest.mark.parametrize("chunk", [8, 13])
def test_of_a_chunk_a_transfer_sends_what_the_next_token_sees(chunk: int) -> None:
    groups = group_layers((0, -chunk))
    for num_tokens in (5, 8, 13, 26, 39, 40):
        plan = ChunkPlan(groups=groups, layers=range(2), num_tokens=num_tokens, num_ready_tokens=num_tokens)
        plan.begin(SIZE, 0)
        runs = {run.layer: (run.first_unit, run.num_units) for run in plan.next_runs(1 << 20)}
        assert plan.all_taken
        first, end = num_tokens // chunk * chunk // SIZE, -(-num_tokens // SIZE)
        assert runs == {0: (0, end)} | ({1: (first, end - first)} if first < end else {})


@pytest.mark.parametrize("windows", [(10, 0), (3, 0, 0), (7,), (-8, 0), (-7, 0)])
@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_a_chunk_behind_one_under_way_keeps_to_the_blocks_that_windows_have_come_to(
    role: str, windows: tuple[int, ...]
) -> None:
    """The first token is drawn right behind the last chunk, which has reached as far as a step can."""
    rig = Rig(role, max_step_tokens=STEP, groups=group_layers(windows))
    job = rig.add(50, max_tokens=2)
    steps = [rig.schedule()]
    while steps[-1].entries:
        for entry in steps[-1].entries:
            assert entry.step.start + len(entry.step.token_ids) <= job.sequence.num_held
        steps.append(rig.scheduler.schedule(steps[-1]) if role == "decode" else rig.schedule())
        rig.end(steps[-2])
    told = [(entry.step.start, len(entry.step.token_ids)) for step in steps for entry in step.entries]
    ends = [start + length for start, length in told]
    assert [start for start, _ in told] == [0, *ends[:-1]], "each goes on where the one before it ends"
    assert ends[-1] == (51 if role == "decode" else 50)
    assert job.has_ended
    assert rig.pool.owned_blocks == 0


def named(pool: BlockPool, num_tokens: int) -> tuple[SequenceState, list[BlockHash]]:
    """A prompt that was computed and released."""
    sequence = SequenceState(request(num_tokens), SIZE, pool.groups, STEP)
    sequence.reserve(pool, num_tokens)
    while sequence.num_uncomputed:
        sequence.computed(pool, min(num_tokens, sequence.num_computed + STEP))
    hashes = list(sequence.block_hashes)
    sequence.reset(pool)
    return sequence, hashes


def test_a_prefix_is_cached_as_far_as_some_window_is_still_whole() -> None:
    pool = BlockPool(60, SIZE, group_layers((0, 10)))
    _, hashes = named(pool, 80)
    assert pool.lookup(hashes) == 20
    table = pool.match(hashes)
    assert NO_BLOCK not in group_table(table, 0, 2)
    assert [block == NO_BLOCK for block in group_table(table, 1, 2)] == [True] * 17 + [False] * 3
    pool.release(table)
    # The window's oldest blocks are the first to be evicted: shorter prefixes are lost before the whole one is.
    pool.release(pool.allocate(30))
    assert pool.lookup(hashes) == 20
    assert pool.lookup(hashes[:10]) < 10


def test_a_prompt_with_windows_is_kept_with_what_goes_on_behind_it() -> None:
    pool = BlockPool(120, SIZE, group_layers((0, 10)))
    sequence = SequenceState(replace(request(80), keep_s=300.0), SIZE, pool.groups, STEP)
    for _ in range(40):  # the answer's window has left the prompt
        sequence.reserve(pool, min(STEP, sequence.num_uncomputed))
        sequence.computed(pool, min(len(sequence.token_ids), sequence.num_computed + STEP))
        if sequence.num_computed >= 80:
            sequence.append(7)
    hashes = sequence.block_hashes[:20]
    sequence.reset(pool)
    for number in range(200):
        blocks = pool.allocate(1)
        pool.publish(blocks[0], number.to_bytes(16, "little"))
        pool.release(blocks)
    assert pool.lookup(hashes) == 20
    assert pool.lookup(hashes[:19]) == 19, "the same prompt computes its last token"
    assert len(pool._kept) == 20 + 4, "of the window, what these two attend to"
    pool.check_integrity()


@pytest.mark.parametrize("window", [6, -10])
def test_a_shared_windows_block_leaves_room_for_its_successor(window: int) -> None:
    groups = group_layers((window,))
    pool = BlockPool(9, SIZE, groups)
    _, hashes = named(pool, 16)
    first = pool.match(hashes)  # 2 blocks of a window
    assert pool.free_blocks == 7
    second = pool.match(hashes)
    assert pool.owned_blocks == 2
    assert pool.free_blocks == 5, "both will want others in their place"
    with pytest.raises(OutOfBlocks):
        pool.allocate(6)
    pool.release(first)
    assert pool.free_blocks == 7
    pool.release(second)
    pool.check_integrity()


def test_kv_that_does_not_arrive_is_computed_from_where_the_sequence_is() -> None:
    pool = BlockPool(60, SIZE, group_layers((0, 10)))
    named(pool, 40)
    sequence = SequenceState(request(96), SIZE, pool.groups, STEP)
    assert sequence.match_prefix(pool) == 40
    sequence.reserve(pool, sequence.num_uncomputed)
    held = pool.owned_blocks
    sequence.expect(pool, 80, keeps_prefix=True)
    assert NO_BLOCK not in group_table(sequence.block_ids, 1, 2)[17:20]
    sequence.expect_nothing(pool)
    assert pool.owned_blocks == held
    while sequence.num_uncomputed:
        sequence.step(min(STEP, sequence.num_uncomputed))
        sequence.computed(pool, min(96, sequence.num_computed + STEP))
    sequence.reset(pool)
    assert pool.owned_blocks == 0
    pool.check_integrity()


@settings(max_examples=150, deadline=None, derandomize=True)
@given(data=st.data(), windows=st.lists(st.sampled_from((0, 0, 2, 5, 13, -8, -13)), min_size=1, max_size=4))
def test_a_begun_prompt_never_lacks_a_block_and_nothing_is_left(data: st.DataObject, windows: list[int]) -> None:
    """Prompts that share beginnings, computed by turns in one tight pool, some of them received, as schedulers do."""
    groups = group_layers(tuple(windows))
    pool = BlockPool(groups.blocks_of(60, SIZE, STEP) + data.draw(st.integers(0, 20)), SIZE, groups)
    begun: list[SequenceState] = []
    for _ in range(data.draw(st.integers(1, 30))):
        if not begun or data.draw(st.booleans()):
            sequence = SequenceState(request(data.draw(st.integers(1, 60))), SIZE, groups, STEP)
            sequence.match_prefix(pool)
            if pool.free_blocks < sequence.blocks_needed(sequence.num_uncomputed):
                sequence.reset(pool)
                continue
            sequence.reserve(pool, sequence.num_uncomputed)
            begun.append(sequence)
            if data.draw(st.booleans()):
                total = data.draw(st.integers(sequence.num_computed + 1, len(sequence.token_ids)))
                sequence.expect(pool, total, keeps_prefix=False)
                sequence.received(pool, total)
        sequence = data.draw(st.sampled_from(begun))
        if sequence.num_uncomputed:
            size = data.draw(st.integers(1, min(STEP, sequence.num_uncomputed)))
            step = sequence.step(size)
            rows = -(-(step.start + size) // SIZE)
            for group in range(groups.count):
                table = group_table(step.block_ids, group, groups.count)
                assert NO_BLOCK not in table[groups.first_kept(group, step.start) // SIZE : rows]
            sequence.computed(pool, sequence.num_computed + size)
        else:
            begun.remove(sequence)
            sequence.reset(pool)
        assert pool.free_blocks >= 0
        pool.check_integrity()
        owned = [block for one in begun for block in set(one.block_ids) - {NO_BLOCK}]
        assert len(set(owned)) == pool.owned_blocks
    for sequence in begun:
        sequence.reset(pool)
    assert pool.owned_blocks == 0
