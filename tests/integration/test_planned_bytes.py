"""The calculators and a server count the same bytes of a model."""

from pathlib import Path
from typing import Any

import pytest
from safetensors import safe_open

from tests.integration.local_fleet import GREEDY, Served, Shape, serve
from tests.model.architectures.test_conformance import FAMILY_SHAPES, random_prompts
from twostroke.model.checkpoint.config_file import load_model_config
from twostroke.model.checkpoint.weights import SINGLE_FILE
from twostroke.model.config import ModelConfig
from twostroke.model.costs.sizes import fit, num_parameters, weight_bytes
from twostroke.model.parallel.form import ONE_RANK, ParallelForm

BLOCK = 16
LENGTHS = (BLOCK, 40, 100, 8 * BLOCK + 1)
MODELS: dict[str, dict[str, Any]] = {
    "keys and values": {},
    "tied, biases": {"tie_word_embeddings": True, "attention_bias": True, "mlp_bias": True},
    "windows": FAMILY_SHAPES["gemma3"] | {"sliding_window": 2 * BLOCK},
    "chunks": FAMILY_SHAPES["llama4"] | {"attention_chunk_size": 2 * BLOCK, "floor_scale": 16},
    "wide heads, shared keys": FAMILY_SHAPES["gemma4"] | {"sliding_window": 4 * BLOCK},
    "fewer and wider heads": FAMILY_SHAPES["gemma4_large"] | {"sliding_window": 4 * BLOCK},
    "states of delta nets": FAMILY_SHAPES["qwen3_5"],
    "states of Mamba-2": FAMILY_SHAPES["granite4"],
    "states of convolutions": FAMILY_SHAPES["lfm2"],
    "latents, experts": FAMILY_SHAPES["deepseek_v3_experts"],
    "latents and an index": FAMILY_SHAPES["glm_moe_dsa"],
    "experts": FAMILY_SHAPES["qwen3_moe"],
}
ITEMSIZE = 4  # fp32


def planned(config: ModelConfig, parallel: ParallelForm = ONE_RANK) -> Any:
    weights = weight_bytes(config, ITEMSIZE, "none", parallel=parallel)
    sizes = {"itemsize": ITEMSIZE, "kv_itemsize": ITEMSIZE, "memory": 1 << 31}
    return fit(config, weights, parallel=parallel, **sizes)


async def sent_bytes(served: Served, prompts: list[list[int]]) -> int:
    before = served.fleet.stats("decode").transfer_bytes
    for prompt in prompts:
        await served.generate(prompt, 2, GREEDY)
    await served.idle()
    return served.fleet.stats("decode").transfer_bytes - before


@pytest.mark.parametrize("model", MODELS)
async def test_weights_cache_and_wire_take_the_bytes_that_were_calculated(model: str, write_checkpoint: Any) -> None:
    folder: Path = write_checkpoint(seed=3, **MODELS[model])
    config = load_model_config(folder)
    with safe_open(folder / SINGLE_FILE, "pt") as file:
        stored = [file.get_tensor(name) for name in file.keys()]  # noqa: SIM118 (it is no mapping)
    assert num_parameters(config) == sum(tensor.numel() for tensor in stored)
    assert weight_bytes(config, ITEMSIZE, "none") == sum(tensor.nbytes for tensor in stored)

    found, prompts = planned(config), random_prompts(96, 1, LENGTHS)
    async with serve(folder, Shape("tcp", num_blocks=64, block_size=BLOCK)) as served:
        (cache, *_) = (parts.rank.loaded.kv_cache for parts in served.fleet.parts.values())
        groups = cache.layout.groups
        of_block = cache.block_bytes * len(cache.tensors)
        assert sum(tensor.nbytes for tensor in cache.tensors) == 64 * of_block
        # Of layers that keep all, which are but a part of the groups where there are windows.
        row = cache.block_size  # tokens
        assert found.kv_bytes_per_token == of_block * (groups.count - len(groups.windowed)) // row
        assert found.rows == found.cache_bytes // (of_block * found.row_tokens // row)
        assert await sent_bytes(served, prompts) == sum(cache.layout.sent_bytes(len(prompt)) for prompt in prompts)


@pytest.mark.parametrize(
    "shares_context", [False, pytest.param(True, marks=pytest.mark.models)], ids=["copies", "parts"]
)
async def test_ranks_are_sent_the_latents_that_they_are_to_hold(shares_context: bool, write_checkpoint: Any) -> None:
    folder: Path = write_checkpoint(seed=3, **FAMILY_SHAPES["deepseek_v3_experts"])
    config, prompts = load_model_config(folder), random_prompts(96, 1, LENGTHS)
    shape = Shape(
        "tcp", num_blocks=64, block_size=BLOCK, decode_ranks=2, shares_context=("decode",) if shares_context else ()
    )
    found = planned(config, ParallelForm(2, shares_contexts=shares_context))
    async with serve(folder, shape) as served:
        (cache,) = (
            parts.rank.loaded.kv_cache
            for peer, parts in served.fleet.parts.items()
            if peer.worker_id.startswith("decode")
        )
        assert cache.block_bytes * len(cache.tensors) == found.kv_bytes_per_token * BLOCK
        blocks = sum(-(-length // BLOCK) for length in LENGTHS)
        assert await sent_bytes(served, prompts) == 2 * found.kv_bytes_per_token * blocks * BLOCK
