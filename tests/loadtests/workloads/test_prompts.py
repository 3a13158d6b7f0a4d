"""Pieces made into token ids and words."""

from hypothesis import given, settings
from hypothesis import strategies as st

from twostroke.loadtests.plan import Piece
from twostroke.loadtests.workloads.prompts import WORDS, text, token_ids

pieces = st.lists(st.builds(Piece, st.integers(0, 2**63 - 1), st.integers(1, 200)), min_size=1, max_size=4)


@settings(deadline=None)
@given(pieces, st.integers(16, 200_000))
def test_ids_are_as_many_as_planned_and_within_the_vocabulary(prompt: list[Piece], vocabulary: int) -> None:
    ids = token_ids(prompt, vocabulary)
    assert len(ids) == sum(piece.tokens for piece in prompt)
    assert all(min(1000, vocabulary // 4) <= each < vocabulary for each in ids)


@settings(deadline=None)
@given(pieces, pieces, pieces)
def test_prompts_that_begin_with_equal_pieces_share_their_beginning(
    common: list[Piece], one: list[Piece], other: list[Piece]
) -> None:
    length = sum(piece.tokens for piece in common)
    assert token_ids(common + one, 4096)[:length] == token_ids(common + other, 4096)[:length] == token_ids(common, 4096)
    assert text(common + one).split()[:length] == text(common + other).split()[:length] == text(common).split()


def test_other_seeds_give_other_tokens() -> None:
    assert token_ids([Piece(1, 50)], 4096) != token_ids([Piece(2, 50)], 4096)
    assert text([Piece(1, 50)]) != text([Piece(2, 50)])


def test_the_same_seed_gives_the_same_tokens_on_every_machine() -> None:
    assert token_ids([Piece(5, 8)], 4096) == [2615, 1986, 1399, 3750, 1133, 3466, 3945, 1954]
    assert text([Piece(5, 8)]) == "time win after they open if under as"


def test_there_is_a_word_for_each_token() -> None:
    assert len(text([Piece(1, 10), Piece(2, 20)]).split()) == 30
    assert len(set(WORDS)) == len(WORDS) > 100
