import pytest
from hypothesis import given
from hypothesis import strategies as st

from twostroke.protocol.blocks import chain_hashes, short_name
from twostroke.router.routing import block_index as prompt_names
from twostroke.router.routing.block_index import PromptNames


def names_of(token_ids, block_size, salt=b""):
    return [short_name(one) for one in chain_hashes(token_ids, block_size, salt)]


@given(st.integers(0, 70), st.integers(0, 40), st.sampled_from((1, 3, 16)), st.binary(max_size=3))
def test_a_prompt_with_its_answer_has_the_names_of_both_together(num_prompt, num_sent, block_size, salt):
    names = PromptNames()
    prompt, sent = tuple(range(num_prompt)), tuple(range(500, 500 + num_sent))
    for _ in range(2):
        assert names.of(prompt, salt, block_size, sent) == names_of((*prompt, *sent), block_size, salt)
        assert names.of(prompt, salt, block_size) == names_of(prompt, block_size, salt)


def test_a_prompt_is_hashed_once_for_each_block_size(monkeypatch):
    hashed = []
    monkeypatch.setattr(prompt_names, "chain_hashes", lambda *asked: hashed.append(asked[1:]) or chain_hashes(*asked))
    names, prompt = PromptNames(), tuple(range(40))
    for sent in ((), (1,), tuple(range(20))):
        for block_size in (8, 16):
            names.of(prompt, b"salt", block_size, sent)
    assert hashed == [(8, b"salt"), (16, b"salt")]
    names.of(prompt, b"another tenant", 8)
    assert hashed[2:] == [(8, b"another tenant")]


@pytest.fixture
def small(monkeypatch):
    monkeypatch.setattr(prompt_names, "_MOST_TOKENS", 100)
    return PromptNames()


def test_prompts_of_long_ago_are_forgotten(small):
    for first in range(50):
        small.of(tuple(range(first, first + 30)), b"", 16)
    assert len(small._prompts) == 3
    assert small._num_tokens == 90


def test_a_prompt_longer_than_all_that_is_kept_is_kept_itself(small):
    small.of(tuple(range(30)), b"", 16)
    small.of(tuple(range(300)), b"", 16)
    assert [len(prompt.token_ids) for prompt in small._prompts.values()] == [300]
