"""Models with windows over block tables as workers keep them: old blocks go back while a request runs."""

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.model.architectures.test_conformance import FAMILY_SHAPES, NEW_TOKENS, make_runner, random_prompts, reference
from twostroke.model.checkpoint.config_file import load_model_config
from twostroke.model.runner import ModelRunner
from twostroke.protocol.requests import GenerateRequest, SamplingParams
from twostroke.worker.scheduling.block_pool import BlockPool
from twostroke.worker.scheduling.job import SequenceState

BLOCK, CHUNK = 8, 37
WITH_WINDOWS = [
    "ministral",
    "mistral_window",
    "gemma3",
    "olmo3",
    "llama4",
    "llama4_dense_between",
    "gemma4",
    "gemma4_large",
]


def generate(runner: ModelRunner, pool: BlockPool, prompt: list[int], num_tokens: int) -> tuple[list[int], int, int]:
    """Greedy; returns the tokens, how many of the prompt were cached, and the most blocks that were held."""
    request = GenerateRequest("r", "router", tuple(prompt), len(prompt), SamplingParams(temperature=0.0), num_tokens)
    sequence = SequenceState(request, BLOCK, pool.groups, CHUNK)
    cached = sequence.match_prefix(pool)
    sequence.reserve(pool, sequence.num_uncomputed)
    most = pool.owned_blocks
    while sequence.num_output_tokens < num_tokens:
        count = min(sequence.num_uncomputed, CHUNK)
        sequence.reserve(pool, count)
        (token,) = runner.run([sequence.step(count)])
        sequence.computed(pool, sequence.num_computed + count)
        most = max(most, pool.owned_blocks)
        pool.check_integrity()
        if token is not None:
            sequence.append(token.token_id)
    output = sequence.token_ids[len(prompt) :]
    sequence.reset(pool)
    assert pool.owned_blocks == 0
    return output, cached, most


@pytest.mark.parametrize("shape", WITH_WINDOWS)
def test_windows_give_their_blocks_back_and_the_tokens_stay_transformers(shape: str, write_checkpoint: Any) -> None:
    folder: Path = write_checkpoint(**FAMILY_SHAPES[shape])
    config = load_model_config(folder)
    groups = config.kv_groups
    assert groups.windowed
    (first,) = random_prompts(config.vocab_size, 1, (600,))
    pool = BlockPool(groups.blocks_of(600 + 40, BLOCK, CHUNK) + 200, BLOCK, groups)
    runner = make_runner(folder, BLOCK, -(-pool.num_blocks // groups.count))

    def answer(prompt: list[int]) -> tuple[int, int]:
        expected, margins = reference(folder, [prompt])
        assert margins.min() > 1e-5, "choose another seed: this model has a near-tie"
        output, cached, most = generate(runner, pool, prompt, NEW_TOKENS)
        assert output == expected[0]
        return cached, most

    with torch.inference_mode():
        cached, most = answer(first)
        assert cached == 0
        assert most <= groups.blocks_of(600 + NEW_TOKENS, BLOCK, CHUNK) < -(-600 // BLOCK) * groups.count
        # Another turn of the conversation goes on from what the windows still cover, and so does a branch of it.
        cached, _ = answer([*first, *random_prompts(config.vocab_size, 2, (30,))[0]])
        assert cached == 600 // BLOCK * BLOCK
        cached, _ = answer([*first[:400], *random_prompts(config.vocab_size, 3, (50,))[0]])
        assert cached <= 400
