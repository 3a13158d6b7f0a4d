"""Prompts of words drawn at random."""

from twostroke.loadtests.plan import Piece
from twostroke.loadtests.workloads import prompts


def test_a_prompt_that_nobody_asks_for_again_is_not_kept() -> None:
    prompts._words.cache_clear()
    prompts._ids.cache_clear()
    drawn = {prompts.random_text(300) for _ in range(5)}
    assert {len(prompt.split()) for prompt in drawn} == {300}
    assert len(drawn) == 5
    shared = Piece(1, 20)
    texts = {prompts.text((shared, Piece(seed, 300))) for seed in range(5)}
    ids = {tuple(prompts.token_ids((shared, Piece(seed, 300)), 5000)[:20]) for seed in range(5)}
    assert (len(texts), len(ids)) == (5, 1)
    assert prompts._words.cache_info().currsize == prompts._ids.cache_info().currsize == 1
