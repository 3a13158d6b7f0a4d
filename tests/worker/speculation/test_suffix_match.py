"""Matches of a text's end: against a plain search, over tenants, within their bounds."""

from collections.abc import Sequence
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from twostroke.worker.speculator import MAX_MATCH, MIN_MATCH, AnswerCorpus, SuffixTokens

WIDE = 2**21 - 1  # the largest token id


def longest(tokens: Sequence[int]) -> tuple[int, int] | None:
    """Return the place behind the longest earlier occurrence of the end, the latest of several, and its length."""
    best: tuple[int, int] | None = None
    for place in range(1, len(tokens)):
        length = 0
        while length < min(place, MAX_MATCH) and tokens[place - 1 - length] == tokens[-1 - length]:
            length += 1
        if length >= MIN_MATCH and (best is None or length >= best[1]):
            best = place, length
    return best


@given(st.lists(st.sampled_from((0, 1, WIDE)), max_size=60), st.lists(st.integers(0, 59), max_size=4))
def test_the_longest_match_is_found_however_the_tokens_came(tokens: list[int], cuts: list[int]) -> None:
    suffix = SuffixTokens(())
    borders = [0, *sorted(min(cut, len(tokens)) for cut in cuts), len(tokens)]
    for begin, end in pairwise(borders):
        suffix.extend(tokens[begin:end])
    match = suffix.longest_match()
    assert (None if match is None else (match.next_place, match.length)) == longest(tokens)
    if match is not None:
        assert match.predict(1) == [tokens[match.next_place]]


def test_a_match_that_reaches_the_end_repeats_itself() -> None:
    match = SuffixTokens([9, 1, 2, 3, 1, 2, 3]).longest_match()
    assert match is not None
    assert match.predict(7) == [1, 2, 3, 1, 2, 3, 1]


def test_answers_continue_a_text_of_their_own_tenant_alone() -> None:
    corpus = AnswerCorpus(1000)
    corpus.add(b"a", [5, 6, 7, 8, 9])
    match = corpus.longest_match(b"a", [1, 6, 7, 8])
    assert match is not None
    assert (match.predict(8), match.length) == ([9], 3)
    assert corpus.longest_match(b"b", [1, 6, 7, 8]) is None
    assert corpus.longest_match(b"a", [7, 8, 9]) is None, "nothing follows the end of an answer"
    corpus.add(b"a", [3, 4, 5, 6])
    assert corpus.longest_match(b"a", [8, 9, 3]) is None, "no match goes from one answer into the next"


@pytest.mark.parametrize("num_tenants", [1, 5])
def test_the_corpus_keeps_the_latest_answers_within_its_bound(num_tenants: int) -> None:
    corpus, most = AnswerCorpus(400), 0
    for number in range(100):
        salt = bytes([number % num_tenants])
        answer = [1000 * number + place for place in range(20)]
        corpus.add(salt, answer)
        most = max(most, corpus.num_tokens)
        assert corpus.longest_match(salt, answer[:5]) is not None
    assert (150 if num_tenants == 1 else 300) < most <= 400
    assert corpus.longest_match(b"\0", [0, 1, 2]) is None, "the first answer is gone"
    corpus.add(b"\0", list(range(500)))
    assert corpus.longest_match(b"\0", [100, 101, 102]) is None, "an answer larger than a part is not kept"
