import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from protocol.tickets import Peer
from router.prefix_index import PIECE_TOKENS, PrefixIndex, pieces_of

A, B = Peer("a", 1), Peer("b", 1)


def tokens(num_pieces, *, first=0):
    return tuple(range(first, first + num_pieces * PIECE_TOKENS))


def pieces(num_pieces, *, first=0, salt=b""):
    return pieces_of(tokens(num_pieces, first=first), salt)


def test_each_worker_is_found_with_as_much_of_the_prefix_as_it_holds():
    index = PrefixIndex()
    index.remember(A, pieces(3))
    index.remember(B, pieces(5))
    assert index.find(pieces(8)) == {A: 3 * PIECE_TOKENS, B: 5 * PIECE_TOKENS}
    assert index.find(pieces(2)) == {A: 2 * PIECE_TOKENS, B: 2 * PIECE_TOKENS}
    assert index.find(pieces(8, first=1)) == {}


def test_a_piece_counts_only_when_it_is_whole():
    index = PrefixIndex()
    index.remember(A, pieces_of(tokens(2)[:-1], b""))
    assert index.find(pieces(2)) == {A: PIECE_TOKENS}


def test_another_tenants_prefix_is_not_found():
    index = PrefixIndex()
    index.remember(A, pieces(3, salt=b"tenant"))
    assert index.find(pieces(3)) == {}
    assert index.find(pieces(3, salt=b"tenant")) == {A: 3 * PIECE_TOKENS}


def test_a_worker_that_left_or_restarted_is_forgotten_and_the_others_are_not():
    index = PrefixIndex()
    index.remember(A, pieces(5))
    index.remember(B, pieces(3))
    index.keep({B, Peer("a", 2)})
    assert index.find(pieces(5)) == {B: 3 * PIECE_TOKENS}
    assert len(index) == 3
    index.keep(())
    assert len(index) == 0


def test_a_full_index_forgets_what_was_not_used_for_longest_from_its_end():
    index = PrefixIndex(max_pieces=8)
    index.remember(A, pieces(4))
    index.remember(A, pieces(4, first=10_000))
    assert index.find(pieces(4)), "used again"
    index.remember(B, pieces(2, first=20_000))
    assert len(index) == 8
    assert index.find(pieces(4)) == {A: 4 * PIECE_TOKENS}
    assert index.find(pieces(4, first=10_000)) == {A: 2 * PIECE_TOKENS}


def test_of_a_prefix_longer_than_the_index_the_beginning_is_kept():
    index = PrefixIndex(max_pieces=3)
    index.remember(A, pieces(9))
    assert index.find(pieces(9)) == {A: 3 * PIECE_TOKENS}


def test_an_index_without_room_is_refused():
    with pytest.raises(ValueError, match="holds nothing"):
        PrefixIndex(0)


@settings(max_examples=50, deadline=None)
@given(st.integers(0, 2**32))
def test_with_room_for_all_it_agrees_with_a_list_of_everything_seen(seed):
    draw = random.Random(seed)
    workers = [Peer(name, epoch) for name in "abc" for epoch in (1, 2)]
    index, seen = PrefixIndex(), []

    def some_prefix():
        """Of one of four prompts that part ways after some pieces."""
        branch, num_pieces = draw.randrange(4), draw.randrange(7)
        return (*tokens(3), *tokens(4, first=1000 * branch))[: num_pieces * PIECE_TOKENS + draw.randrange(PIECE_TOKENS)]

    for _ in range(40):
        match draw.randrange(3):
            case 0:
                worker, prefix = draw.choice(workers), some_prefix()
                index.remember(worker, pieces_of(prefix, b""))
                seen.append((worker, prefix))
            case 1 if draw.random() < 0.2:
                left = draw.sample(workers, 4)
                index.keep(left)
                seen = [(worker, prefix) for worker, prefix in seen if worker in left]
        prompt = some_prefix()
        expected = {}
        for worker, prefix in seen:
            same = 0
            while (end := same + PIECE_TOKENS) <= len(prompt) and prompt[:end] == prefix[:end] and end <= len(prefix):
                same = end
            if same:
                expected[worker] = max(same, expected.get(worker, 0))
        assert index.find(pieces_of(prompt, b"")) == expected
