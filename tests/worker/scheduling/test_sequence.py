from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from twostroke.protocol.block_hash import chain_hashes
from twostroke.protocol.requests import GenerateRequest, SamplingParams, ScoringParams
from twostroke.worker.scheduling.block_pool import BlockPool
from twostroke.worker.scheduling.job import SequenceState

BLOCK_SIZE = 4
STOP = (2, 3)


def request(
    num_tokens: int = 10,
    *,
    num_prompt_tokens: int | None = None,
    min_tokens: int = 0,
    salt: bytes = b"",
    first_token: int = 100,
) -> GenerateRequest:
    return GenerateRequest(
        request_id="r",
        router_id="router",
        token_ids=tuple(range(first_token, first_token + num_tokens)),
        num_prompt_tokens=num_tokens if num_prompt_tokens is None else num_prompt_tokens,
        sampling=SamplingParams(seed=5),
        max_tokens=50,
        min_tokens=min_tokens,
        stop_token_ids=STOP,
        cache_salt=salt,
    )


def compute(sequence: SequenceState, pool: BlockPool, num_tokens: int) -> None:
    """Reserve blocks and account for a step, like a scheduler."""
    sequence.reserve(pool, num_tokens)
    sequence.step(num_tokens)
    sequence.computed(pool, sequence.num_computed + num_tokens)


def test_hashes_grow_with_the_tokens_as_the_whole_chain_would() -> None:
    sequence = SequenceState(request(3, salt=b"tenant"), BLOCK_SIZE)
    assert sequence.block_hashes == []
    for token in range(20):
        sequence.append(token)
        assert sequence.block_hashes == chain_hashes(sequence.token_ids, BLOCK_SIZE, b"tenant")


def test_matching_into_a_table_with_blocks_is_refused() -> None:
    pool = BlockPool(8, BLOCK_SIZE)
    sequence = SequenceState(request(), BLOCK_SIZE)
    sequence.reserve(pool, 4)
    with pytest.raises(ValueError, match="request r already has blocks"):
        sequence.match_prefix(pool)


def test_a_preempted_sequence_publishes_again_what_was_evicted_meanwhile() -> None:
    pool = BlockPool(3, BLOCK_SIZE)
    sequence = SequenceState(request(9), BLOCK_SIZE)
    compute(sequence, pool, 9)
    sequence.reset(pool)
    pool.release(pool.allocate(3))
    assert pool.lookup(sequence.block_hashes) == 0
    compute(sequence, pool, 9)
    assert pool.lookup(sequence.block_hashes) == 2
    (last,) = sequence.block_ids[2:]
    assert pool.names(last, last + 1) == []


def test_stop_tokens_are_forbidden_until_the_minimum_is_out() -> None:
    pool = BlockPool(8, BLOCK_SIZE)
    sequence = SequenceState(request(4, min_tokens=2), BLOCK_SIZE)
    sequence.reserve(pool, 8)
    forbidden = []
    for token in (11, 12, 13):
        draw = sequence.step(sequence.num_uncomputed).draw
        assert draw is not None
        forbidden.append(draw.forbidden)
        sequence.num_computed = len(sequence.token_ids)
        sequence.append(token)
    assert forbidden == [STOP, STOP, ()]


@pytest.mark.parametrize(
    ("num_tokens", "message"), [(0, "left to compute"), (11, "left to compute"), (9, "2 blocks don't hold 9 tokens")]
)
def test_an_impossible_step_is_refused(num_tokens: int, message: str) -> None:
    sequence = SequenceState(request(10), BLOCK_SIZE)
    sequence.reserve(BlockPool(8, BLOCK_SIZE), 8)
    with pytest.raises(ValueError, match=message):
        sequence.step(num_tokens)


@settings(max_examples=100, deadline=None, derandomize=True)
@given(
    lengths=st.lists(st.integers(1, 20), min_size=1, max_size=4),
    chunk=st.integers(1, 9),
    num_outputs=st.integers(0, 9),
    block_size=st.integers(1, 5),
)
def test_any_chunking_computes_each_token_once_and_leaves_nothing_behind(
    lengths: list[int], chunk: int, num_outputs: int, block_size: int
) -> None:
    pool = BlockPool(40, block_size)
    for length in lengths:
        sequence = SequenceState(request(length), block_size)
        cached = sequence.match_prefix(pool)
        starts = [cached]
        for output in range(num_outputs + 1):
            while sequence.num_uncomputed:
                num_tokens = min(chunk, sequence.num_uncomputed)
                sequence.reserve(pool, num_tokens)
                step = sequence.step(num_tokens)
                assert (step.draw is not None) == (step.start + num_tokens == len(sequence.token_ids))
                assert len(step.block_ids) * block_size >= step.start + num_tokens
                starts.append(step.start + num_tokens)
                sequence.computed(pool, sequence.num_computed + num_tokens)
                pool.check_integrity()
            if output < num_outputs:
                sequence.append(output)
        assert starts[-1] == length + num_outputs
        assert all(before < after for before, after in pairwise(starts))
        assert pool.lookup(sequence.block_hashes) == (length + num_outputs) // block_size
        sequence.reset(pool)
        assert pool.owned_blocks == 0
        pool.check_integrity()


@settings(max_examples=200, deadline=None, derandomize=True)
@given(
    length=st.integers(1, 12),
    block_size=st.integers(1, 5),
    actions=st.lists(st.tuples(st.sampled_from(("begin", "step", "give up")), st.integers(0, 9)), max_size=40),
)
def test_choices_of_one_prompt_copy_its_end_and_leave_nothing_when_given_up(
    length: int, block_size: int, actions: list[tuple[str, int]]
) -> None:
    pool = BlockPool(200, block_size)
    first = SequenceState(request(length), block_size)
    first.reserve(pool, length)
    first.computed(pool, length)
    choices: list[SequenceState] = []
    for action, number in actions:
        choice = choices[number % len(choices)] if choices else None
        if action == "begin":
            begun = SequenceState(request(length), block_size)
            begun.match_prefix(pool)
            begun.reserve(pool, begun.num_uncomputed)
            begun.match_tail(pool)
            assert begun.num_uncomputed == 1
            choices.append(begun)
        elif choice is not None and action == "step":
            choice.reserve(pool, 1)
            step = choice.step(1)
            assert (step.copied_from is not None) == choice.awaits_copy
            assert step.copied_from not in choice.block_ids
            choice.computed(pool, choice.num_computed + 1)
            choice.append(number)
        elif choice is not None:
            choices.remove(choice)
            choice.reset(pool)
        pool.check_integrity()
    for choice in (first, *choices):
        choice.reset(pool)
    assert pool.owned_blocks == 0
    pool.check_integrity()


@pytest.mark.parametrize("length", [3, 7])
def test_the_end_of_a_prompt_is_shared_only_under_the_same_salt_and_for_what_reads_nothing_off_it(length: int) -> None:
    pool = BlockPool(20, BLOCK_SIZE)
    first = SequenceState(request(length), BLOCK_SIZE)
    first.reserve(pool, length)
    first.computed(pool, length)
    scoring = ScoringParams(logprobs=0)
    for other in (replace(first.request, cache_salt=b"tenant"), replace(first.request, scoring=scoring)):
        stranger = SequenceState(other, BLOCK_SIZE)
        stranger.match_prefix(pool)
        stranger.reserve(pool, stranger.num_uncomputed)
        assert stranger.match_tail(pool) == 0
