import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.router.routing.knowing import Clock
from twostroke.protocol.block_hash import chain_hashes, pack_names, short_name
from twostroke.protocol.messages import BlocksChanged, BlocksHeld
from twostroke.protocol.requests import Peer
from twostroke.router.routing import block_index
from twostroke.router.routing.block_index import BlockIndex, PromptNames

A, B, C = (Peer(name, 1) for name in "abc")


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def index(clock):
    return BlockIndex(clock=clock, max_blocks=1000, expected_s=5.0)


def cached_tokens(index, names, *workers):
    """Return the number of the first `names` that each worker holds; those with none are left out."""
    counts = index.find(names)
    known = {worker: index._workers.get(worker) for worker in workers}
    return {worker: counts[one.column] for worker, one in known.items() if one is not None and counts[one.column]}


def all_of(*names, sequence=0, is_first=True, is_last=True):
    return BlocksHeld(pack_names(names), is_first=is_first, is_last=is_last, sequence=sequence)


def change(sequence, stored=(), removed=()):
    return BlocksChanged(sequence, pack_names(stored), pack_names(removed))


def test_a_gap_is_told_once_and_mended_by_the_next_snapshot_alone(index):
    index.heard(A, all_of(1, 2, sequence=7))
    assert not index.heard(A, change(9, stored=[3]))
    assert index.heard(A, change(10, stored=[3])), "it has been asked already"
    assert cached_tokens(index, [1, 2, 3], A) == {A: 2}, "what was known is still the best guess"
    assert index.heard(A, all_of(3, sequence=10))
    assert index.heard(A, change(11, stored=[1]))
    assert cached_tokens(index, [1, 2, 3], A) == {A: 1}, "what the snapshot does not have is forgotten"


def test_where_states_are_left_the_last_one_counts_whatever_was_left_before(index):
    for worker, names in ((A, [1, 2, 3]), (B, [3]), (C, [2, 5])):
        index.heard(worker, all_of(*names))
    index.expect_blocks(C, [4])
    found = index.find_last([1, 2, 3, 4])
    assert [found[index._workers[worker].column] for worker in (A, B, C)] == [3, 3, 4]
    index.keep([A])
    assert index.find_last([1, 2, 3, 4])[index._workers[A].column] == 3
    assert sum(index.find_last([4])) == 0


def test_a_snapshot_may_come_in_pieces_with_changes_between_them(index):
    index.heard(A, all_of(1, sequence=4, is_last=False))
    index.heard(A, change(5, stored=[9], removed=[1]))
    assert index.heard(A, all_of(1, 2, sequence=5, is_first=False))
    assert cached_tokens(index, [1, 2], A) == {A: 2}
    assert cached_tokens(index, [9], A) == {A: 1}


def test_a_piece_of_another_moment_is_a_gap(index):
    index.heard(A, all_of(1, sequence=4, is_last=False))
    assert not index.heard(A, all_of(2, sequence=6, is_first=False))
    assert index.heard(A, all_of(3, sequence=6, is_first=False)), "the rest of what is over now"
    assert cached_tokens(index, [3], A) == {}


def test_a_worker_that_was_forgotten_while_it_told_changes_is_asked_once_for_all(index):
    index.heard(A, all_of(1))
    index.keep({B})
    assert not index.heard(A, change(1, stored=[2]))
    assert index.heard(A, change(2, stored=[3]))
    assert cached_tokens(index, [1, 2], A) == cached_tokens(index, [3], A) == {}


def test_what_workers_that_are_gone_held_is_wiped_out_little_by_little(index, monkeypatch):
    monkeypatch.setattr(block_index, "_SWEEP", 10)
    index.heard(A, all_of(*range(100)))
    index.heard(B, all_of(*range(50)))
    index.keep({B})
    assert len(index) == 100, "not at once"
    for sequence in range(1, 20):
        index.heard(B, change(sequence))
    assert len(index) == 50
    index.heard(C, all_of(7))
    assert cached_tokens(index, [7], B, C) == {B: 1, C: 1}
    assert len(index.find([7])) == 2, "C has A's old place"
    index.keep(())
    assert len(index) == 0


def test_what_is_expected_counts_until_its_time_is_over(index, clock):
    index.heard(A, all_of(1))
    index.expect_blocks(A, [1, 2, 3])
    index.expect_blocks(B, [1])
    assert cached_tokens(index, [1, 2, 3], A, B) == {A: 3, B: 1}
    clock.now = 5.5
    index.expect_blocks(C, [1])
    assert cached_tokens(index, [1, 2, 3], A, B, C) == {A: 3, B: 1, C: 1}, "for twice as long at most"
    clock.now = 10.5
    assert cached_tokens(index, [1, 2, 3], A, B, C) == {A: 1, C: 1}
    clock.now = 100.0
    assert cached_tokens(index, [1, 2, 3], A, B, C) == {A: 1}


def test_what_a_worker_is_known_to_hold_is_not_expected_again(index):
    index.heard(A, all_of(1, 2))
    for names in ([1, 2, 3], [1, 2, 3, 4]):
        index.expect_blocks(A, names)
    assert set(index._expected) == {3, 4}


def test_what_a_worker_says_is_gone_is_expected_no_more(index):
    index.heard(A, all_of(1))
    index.expect_blocks(A, [1, 2])
    index.heard(A, change(1, removed=[2]))
    assert cached_tokens(index, [1, 2], A) == {A: 1}


def test_a_full_index_learns_no_new_blocks_but_who_else_holds_known_ones(clock):
    index = BlockIndex(clock=clock, max_blocks=3, expected_s=5.0)
    index.heard(A, all_of(1, 2, 3, 4, 5))
    index.heard(B, all_of(1, 9))
    for worker in (B, C):
        index.expect_blocks(worker, [1, 2, 3, 4])
    assert len(index) == len(index._expected) == 3
    assert cached_tokens(index, [1, 2, 3, 4], A, B) == {A: 3, B: 4}, "B's are the three that it was not known to hold"


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 2**32))
def test_it_agrees_with_a_list_of_everything_that_was_heard(seed):
    draw = random.Random(seed)
    clock = Clock()
    index = BlockIndex(clock=clock, max_blocks=10_000, expected_s=5.0)
    workers = [Peer(name, epoch) for name in "abc" for epoch in (1, 2)]
    depths: dict[Peer, list[int]] = {}  # to which each holds each of four prompts
    sequences: dict[Peer, int] = {}

    def names(prompt, depth):
        """Names of prompts that part ways after three blocks."""
        return [1 + block if block < 3 else 1000 * (prompt + 1) + block for block in range(depth)]

    def held_by(worker):
        return {name for prompt, depth in enumerate(depths[worker]) for name in names(prompt, depth)}

    for _ in range(60):
        worker, prompt = draw.choice(workers), draw.randrange(4)
        match draw.randrange(4):
            case 0:
                depths[worker] = [draw.randrange(8) for _ in range(4)]
                sequences[worker] = draw.randrange(100)
                index.heard(worker, all_of(*held_by(worker), sequence=sequences[worker]))
            case 1 if worker in depths:
                before = held_by(worker)
                depths[worker][prompt] = draw.randrange(8)
                after = held_by(worker)
                sequences[worker] += 1
                index.heard(worker, change(sequences[worker], stored=after - before, removed=before - after))
            case 2:
                left = draw.sample(workers, 4)
                index.keep(left)
                for gone in set(workers) - set(left):
                    depths.pop(gone, None)
        found = cached_tokens(index, names(prompt, 8), *workers)
        for worker in workers:
            depth = max((min(one, 3) for one in depths.get(worker, [])), default=0)
            depth = max(depth, depths[worker][prompt]) if worker in depths else 0
            assert found.get(worker, 0) == depth


# --- names of a prompt's blocks ---


def names_of(token_ids, block_size, salt=b""):
    return [short_name(one) for one in chain_hashes(token_ids, block_size, salt)]


@settings(deadline=None)
@given(st.integers(0, 70), st.integers(0, 40), st.sampled_from((1, 3, 16)), st.binary(max_size=3))
def test_a_prompt_with_its_answer_has_the_names_of_both_together(num_prompt, num_sent, block_size, salt):
    names = PromptNames()
    prompt, sent = tuple(range(num_prompt)), tuple(range(500, 500 + num_sent))
    for _ in range(2):
        assert names.of(prompt, salt, block_size, sent) == names_of((*prompt, *sent), block_size, salt)
        assert names.of(prompt, salt, block_size) == names_of(prompt, block_size, salt)


def test_a_prompt_is_hashed_once_for_each_block_size(monkeypatch):
    hashed = []
    monkeypatch.setattr(block_index, "chain_hashes", lambda *asked: hashed.append(asked[1:]) or chain_hashes(*asked))
    names, prompt = PromptNames(), tuple(range(40))
    for sent in ((), (1,), tuple(range(20))):
        for block_size in (8, 16):
            names.of(prompt, b"salt", block_size, sent)
    assert hashed == [(8, b"salt"), (16, b"salt")]
    names.of(prompt, b"another tenant", 8)
    assert hashed[2:] == [(8, b"another tenant")]


@pytest.fixture
def small(monkeypatch):
    monkeypatch.setattr(block_index, "_MAX_TOKENS", 100)
    return PromptNames()


def test_prompts_of_long_ago_are_forgotten(small):
    for first in range(50):
        small.of(tuple(range(first, first + 30)), b"", 16)
    assert len(small._chains) == 3
    assert small._num_tokens == 90


def test_a_prompt_longer_than_all_that_is_kept_is_kept_itself(small):
    small.of(tuple(range(30)), b"", 16)
    small.of(tuple(range(300)), b"", 16)
    assert [len(prompt.token_ids) for prompt in small._chains.values()] == [300]
