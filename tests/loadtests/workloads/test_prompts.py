"""Prompts of words drawn at random."""

from twostroke.loadtests.workloads import prompts


def test_a_prompt_that_nobody_asks_for_again_is_not_kept() -> None:
    prompts._words.cache_clear()
    drawn = {prompts.random_text(300) for _ in range(5)}
    assert {len(prompt.split()) for prompt in drawn} == {300}
    assert len(drawn) == 5
    assert prompts._words.cache_info().currsize == 0
