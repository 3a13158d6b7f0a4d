"""Every family generates what transformers does, greedily and in fp32, token by token, over random weights.

By one engine with chunked prompts beside decodes, by several ranks, and by a prefill and a decode engine with a real KV
transfer, over a cold cache and for conversations that go on. All but a thin slice is the wide matrix of `make
test-models`.
"""

from pathlib import Path
from typing import Any

import pytest

from tests.architectures.checkpoints import FOUR_HEADS, OTHERS, OURS, write_checkpoint
from tests.architectures.engines import (
    BLOCK_SIZE,
    disaggregated,
    make_engine,
    random_prompts,
    ranks,
    reference,
)
from twostroke.model.parallel.form import ParallelForm
from twostroke.model.served import Way, open_model
from twostroke.protocol.errors import ConfigError

NEW_TOKENS = 16
LENGTHS = (1, 7, 64, 131, 600)
THIN = {"gpt_neox", "cohere2"}
CASES = [
    pytest.param(name, way, marks=() if name in THIN else pytest.mark.models)
    for way, names in (("native", OURS), ("transformers", OTHERS))
    for name in names
]
SEEDS = {("llama", True): 1}
"""Other seeds where 0 has too many near-ties."""
WITHOUT_PLAN = "transformers has no plan for"
NOT_BY_RANKS = {
    "biogpt": WITHOUT_PLAN,
    "gpt2": WITHOUT_PLAN,
    "hunyuan_v1_dense": WITHOUT_PLAN,
    "opt": WITHOUT_PLAN,
    "persimmon": WITHOUT_PLAN,
    "stablelm": WITHOUT_PLAN,
}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A folder by family, made when it is first asked for."""
    made: dict[tuple[str, bool], Path] = {}

    def folder(name: str, *, is_shared: bool = False) -> Path:
        """`is_shared`: with heads that two ranks can share."""
        if (name, is_shared) not in made:
            made[name, is_shared] = tmp_path_factory.mktemp(name)
            fields = {**OTHERS, **OURS}[name]
            heads = fields.get("num_attention_heads", 9), fields.get("num_key_value_heads", 2)
            more = FOUR_HEADS if is_shared and (heads[0] % 2 or heads[1] % 2) else {}
            write_checkpoint(made[name, is_shared], name, fields | more, SEEDS.get((name, is_shared), 0))
        return made[name, is_shared]

    return folder


def assert_begins(answers: list[list[int]], expected: list[list[int]]) -> None:
    """`expected` end at near-ties."""
    assert [answer[: len(row)] for answer, row in zip(answers, expected, strict=True)] == expected


@pytest.mark.parametrize(("name", "way"), CASES)
def test_an_engine_generates_what_transformers_does(name: str, way: Way, folders: Any, generate: Any) -> None:
    folder = folders(name)
    prompts = random_prompts(101, LENGTHS)
    runner, _ = make_engine(folder, way)
    answers = generate(runner, prompts, NEW_TOKENS, chunk=37, block_size=BLOCK_SIZE)
    assert_begins(answers, reference(folder, prompts, NEW_TOKENS))


@pytest.mark.parametrize(("name", "way"), CASES)
def test_two_ranks_generate_what_transformers_does(name: str, way: Way, folders: Any, generate: Any) -> None:
    folder = folders(name, is_shared=True)
    prompts = random_prompts(101, LENGTHS[:4])
    if name in NOT_BY_RANKS:
        with pytest.raises(ConfigError, match=NOT_BY_RANKS[name]):
            open_model(folder, way).check_ranks(ParallelForm(2), 16)
        return
    with ranks(folder, way, 2) as together:
        answers = generate(together, prompts, NEW_TOKENS, chunk=37, block_size=BLOCK_SIZE)
    assert_begins(answers, reference(folder, prompts, NEW_TOKENS))


@pytest.mark.parametrize(("name", "way"), CASES)
async def test_conversations_over_a_transfer_are_what_transformers_makes_of_them(
    name: str, way: Way, folders: Any
) -> None:
    folder = folders(name)
    first = random_prompts(101, LENGTHS[:4])
    said = reference(folder, first, NEW_TOKENS)
    # The next turn begins with all of the one before.
    more = random_prompts(101, (5, 30, 1, 80), seed=2)
    second = [prompt + answer + new for prompt, answer, new in zip(first, said, more, strict=True)]
    for answers, expected in zip(
        await disaggregated(folder, way, [first, second], NEW_TOKENS),
        (said, reference(folder, second, NEW_TOKENS)),
        strict=True,
    ):
        assert_begins(answers, expected)
