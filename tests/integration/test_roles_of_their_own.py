"""Prefill workers with whole weights beside decode workers with quantised ones.

What is right is told by two engines over one KV cache: the prompt is read with whole weights, and each token behind the
first one is drawn with the quantised ones.
"""

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.integration.local_fleet import GREEDY, VOCAB, Served, Shape, serve
from tests.model.architectures.test_conformance import random_prompts
from tests.model.conftest import make_decoder
from twostroke.model.architectures.decoder import Decoder
from twostroke.model.cpu.backend import CpuBackend
from twostroke.model.runner import ModelRunner
from twostroke.model.sampling.sampler import Sampler
from twostroke.model.step import Draw, SequenceStep

PROMPTS = random_prompts(VOCAB, 1, (1, 17, 64, 100, 200))
NEW_TOKENS = 24
NUM_BLOCKS, BLOCK_SIZE = 32, 16


async def answers(served: Served) -> list[list[int]]:
    """Return the answers to one prompt after the other, so that no row's sums depend on what runs beside it."""
    return [await served.generate(prompt, NEW_TOKENS, GREEDY) for prompt in PROMPTS]


def drawn_over_one_cache(folder: Path, quantization: Any) -> list[list[int]]:
    """The prompt by whole weights, and its first token; the others by quantised ones over the same KV."""
    sizes = {"num_blocks": NUM_BLOCKS, "block_size": BLOCK_SIZE}
    whole, cache = make_decoder(folder, CpuBackend(), **sizes)
    quantised: Decoder = make_decoder(folder, CpuBackend(), quantization=quantization, **sizes)[0]
    reads, writes = (ModelRunner(one, Sampler(VOCAB), cache, 512) for one in (whole, quantised))

    def answer(prompt: list[int]) -> list[int]:
        tokens = list(prompt)
        for runner in (reads, *[writes] * (NEW_TOKENS - 1)):
            new = tokens if runner is reads else tokens[-1:]
            draw = Draw(GREEDY, tokens, len(prompt))
            (drawn,) = runner.run([SequenceStep(list(new), len(tokens) - len(new), range(NUM_BLOCKS), draw)])
            assert drawn is not None
            tokens.append(drawn.token_id)
        return tokens[len(prompt) :]

    return [answer(prompt) for prompt in PROMPTS]


@pytest.mark.parametrize("quantization", ["int8", "int4"])
async def test_a_quantised_decode_worker_goes_on_from_kv_of_whole_weights(
    quantization: str, write_checkpoint: Any
) -> None:
    torch.set_num_threads(1)
    folder = write_checkpoint(seed=3, hidden_size=64, intermediate_size=64)  # int4 takes groups of 64
    expected = drawn_over_one_cache(folder, quantization)
    assert expected != drawn_over_one_cache(folder, "none"), "else nothing is shown"
    async with serve(folder, Shape("tcp", decode_quantization=quantization)) as served:
        held = {info.role: info.weights for info in served.fleet.infos}
        assert held == {"prefill": None, "decode": quantization}
        assert await answers(served) == expected
        assert await answers(served) == expected, "with a warm prefix cache"
        await served.idle()
        stats = served.fleet.stats("decode")
    assert (stats.transfers_done, stats.transfers_failed) == (2 * len(PROMPTS), 0)
