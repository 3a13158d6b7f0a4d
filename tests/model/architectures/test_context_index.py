"""The tokens that an index chooses are those of transformers' indexers, in fp32."""

from collections import defaultdict
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from tests.model.architectures.test_conformance import FAMILY_SHAPES, make_runner, random_prompts
from twostroke.model.architectures import context_index
from twostroke.model.architectures.context_index import ContextIndex, IndexQueries, in_order_of_choice
from twostroke.model.batch import BatchLayout
from twostroke.model.checkpoint.config_file import load_model_config

LENGTHS = (90, 23, 57)
NEW_TOKENS = 9

Chosen = dict[int, dict[int, dict[int, set[int]]]]
"""The tokens that a query attends to, by index, sequence and the query's position."""


@pytest.fixture
def choices(monkeypatch: pytest.MonkeyPatch) -> Chosen:
    """Record what indexes choose from now on. Sequences are told apart by their first blocks."""
    found: Chosen = defaultdict(lambda: defaultdict(dict))
    original = ContextIndex.choose

    def choose(self: ContextIndex, queries: IndexQueries, kv_layer: Tensor, layout: BatchLayout) -> Tensor:
        chosen, size = original(self, queries, kv_layer, layout), kv_layer.shape[3]
        starts = layout.query_starts.tolist()
        for sequence, (begin, end) in enumerate(pairwise(starts)):
            table = layout.block_tables[sequence].tolist()
            for row in range(begin, end):
                position = int(layout.positions[row])
                slots = chosen[row, : position + 1].tolist()
                tokens = [table.index(slot // size) * size + slot % size for slot in slots]
                assert len({*tokens}) == len(tokens), "no token is chosen twice"
                found[id(self)][table[0]][position] = {*tokens}
        return chosen

    monkeypatch.setattr(ContextIndex, "choose", choose)
    return found


@pytest.mark.parametrize("shape", ["deepseek_v32_experts", "glm_moe_dsa"])
@pytest.mark.parametrize("most_scores", [1 << 23, 3000], ids=["at once", "in parts"])
def test_the_choice_is_that_of_transformers(
    shape: str,
    most_scores: int,
    write_checkpoint: Any,
    generate: Any,
    choices: Chosen,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(context_index, "MAX_SCORES", most_scores)
    folder = write_checkpoint(**FAMILY_SHAPES[shape])
    config = load_model_config(folder)
    assert config.index is not None
    prompts = random_prompts(config.vocab_size, 1, LENGTHS)
    answers = generate(make_runner(folder, 8, 64), prompts, NEW_TOKENS, chunk=37, block_size=8)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    indexers = [layer.self_attn.indexer for layer in model.model.layers if layer.self_attn.indexer is not None]
    assert len(choices) == len(indexers) == config.num_layers - len(config.index.sharing)
    theirs: list[Tensor] = []
    for indexer in indexers:
        indexer.register_forward_hook(lambda module, inputs, output: theirs.append(output[0]))
    compared = 0
    for sequence, (prompt, answer) in enumerate(zip(prompts, answers, strict=True)):
        theirs.clear()
        with torch.no_grad():
            model(torch.tensor([prompt + answer[:-1]]))
        ours = [by_sequence[sorted(by_sequence)[sequence]] for by_sequence in choices.values()]
        for expected, rows in zip(theirs, ours, strict=True):
            for position, tokens in rows.items():
                assert tokens == {token for token in expected[position].tolist() if token <= position}
                compared += position >= config.index.top_k
    assert compared > 100


def test_a_context_that_is_attended_to_as_a_whole_is_not_scored(
    write_checkpoint: Any, generate: Any, choices: Chosen
) -> None:
    folder = write_checkpoint(**FAMILY_SHAPES["deepseek_v32_experts"])  # of 24 tokens
    prompts = random_prompts(96, 1, (1, 16))
    generate(make_runner(folder, 8, 64), prompts, NEW_TOKENS, chunk=37, block_size=8)
    assert not choices
    generate(make_runner(folder, 8, 64), prompts, NEW_TOKENS + 1, chunk=37, block_size=8)
    assert choices


def test_of_equal_scores_the_first_token_is_chosen() -> None:
    scores = torch.tensor([[0.0, -0.0, 0.5, -1.0, 0.0, -torch.inf, -2.0, -0.0]])
    assert in_order_of_choice(scores).topk(8).indices.tolist() == [[2, 0, 1, 4, 7, 3, 6, 5]]
