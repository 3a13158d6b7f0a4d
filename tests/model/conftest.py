"""Random-weight Llama folders, and a naive scheduler that runs prompts through a runner."""

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from twostroke.model.architectures.decoder import Decoder
from twostroke.model.backend import Backend, LoadOptions
from twostroke.model.cache.kv_cache import KVCache, make_kv_cache
from twostroke.model.checkpoint.config_file import load_model_config, parse_model_config
from twostroke.model.checkpoint.decoder_weights import load_decoder_weights
from twostroke.model.checkpoint.weights import INDEX_FILE, SINGLE_FILE, Checkpoint
from twostroke.model.config import Quantization
from twostroke.model.parallel.form import ParallelForm
from twostroke.model.parallel.tensor_parallel import ContextParts, SingleRank, TensorParallel
from twostroke.model.parameters import expected_shapes
from twostroke.model.runner import ModelRunner
from twostroke.model.sampling.sampler import DrawBatch, row_keys
from twostroke.model.step import Draw, SequenceStep
from twostroke.protocol.requests import SamplingParams

TINY: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 1024,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
    "bos_token_id": None,
    "eos_token_id": None,
}

WriteCheckpoint = Callable[..., Path]
Generate = Callable[..., list[list[int]]]


@pytest.fixture(autouse=True, scope="session")
def _one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def write_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> WriteCheckpoint:
    """Makes a folder: `fields` over TINY in config.json, weights N(0, scale / sqrt(fan in)) from `seed`."""

    def write(
        *, seed: int = 0, dtype: torch.dtype = torch.float32, scale: float = 1.5, shards: int = 1, **fields: Any
    ) -> Path:
        folder = tmp_path_factory.mktemp("model")
        raw = TINY | fields
        if "architectures" in fields and "model_type" not in fields:
            del raw["model_type"]
        (folder / "config.json").write_text(json.dumps(raw))
        generator = torch.Generator().manual_seed(seed)
        tensors: dict[str, torch.Tensor] = {}
        for name, shape in expected_shapes(parse_model_config(raw, "test")).items():
            value = torch.randn(shape, generator=generator) * scale / shape[-1] ** 0.5
            tensors[name] = (value + 1 if name.endswith("norm.weight") else value).to(dtype)
        if shards == 1:
            save_file(tensors, folder / SINGLE_FILE, metadata={"format": "pt"})
            return folder
        weight_map = {name: f"model-{i % shards + 1:05}-of-{shards:05}.safetensors" for i, name in enumerate(tensors)}
        for file in sorted(set(weight_map.values())):
            part = {name: tensor for name, tensor in tensors.items() if weight_map[name] == file}
            save_file(part, folder / file, metadata={"format": "pt"})
        (folder / INDEX_FILE).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
        return folder

    return write


def make_decoder(
    folder: Path,
    backend: Backend,
    *,
    num_blocks: int,
    block_size: int,
    max_context: int | None = None,
    parallel: TensorParallel | None = None,
    dtype: torch.dtype = torch.float32,
    device: torch.device = torch.device("cpu"),  # noqa: B008
    quantization: Quantization = "auto",
    kv_dtype: torch.dtype | None = None,
    redundant_experts: int = 0,
    shares_context: bool = False,
) -> tuple[Decoder, KVCache]:
    """A rank's decoder over a folder's weights, and a cache of zeros."""
    config, parallel = load_model_config(folder), SingleRank() if parallel is None else parallel
    checkpoint, shard, stage = Checkpoint(folder, config), parallel.shard, parallel.stage
    config = checkpoint.config
    context = max_context or config.max_position
    options = LoadOptions(dtype, device, context, quantization, kv_dtype, redundant_experts, shares_context)
    parts = ContextParts(parallel) if shares_context else None
    weights = load_decoder_weights(checkpoint, config, options, backend, shard, stage, parts)
    cache = make_kv_cache(
        config,
        num_blocks=num_blocks,
        block_size=block_size,
        dtype=kv_dtype or dtype,
        device=device,
        model_digest="",
        parallel=ParallelForm(shard.size, stage.count, shares_contexts=shares_context),
        rank=stage.index * shard.size + shard.rank,
    )
    return Decoder(config, weights, backend, parallel), cache


def draw_batch(
    rows: int, filters: tuple[int, float, float], temperatures: Sequence[float] = (0.125, 0.5, 1.0, 2.0), seed: int = 0
) -> DrawBatch:
    """Rows with these (top_k, top_p, min_p); temperatures are taken in turn."""
    top_k, top_p, min_p = (np.float32(value) for value in filters)
    return DrawBatch(
        rows=np.arange(rows),
        temperature=np.resize(np.array(temperatures), rows),
        top_k=np.full(rows, int(top_k)),
        top_p=np.full(rows, float(top_p)),
        min_p=np.full(rows, float(min_p)),
        keys=row_keys(np.arange(seed, seed + rows, dtype=np.uint64), np.full(rows, 9, np.uint64)),
    )


@pytest.fixture(scope="session")
def generate() -> Generate:
    """Greedy continuations by a runner: chunked prefill of one prompt a step, beside the decodes of those before it."""

    def run(
        runner: ModelRunner,
        prompts: Sequence[Sequence[int]],
        new_tokens: int,
        *,
        chunk: int,
        block_size: int,
        cached: Sequence[int] | None = None,
    ) -> list[list[int]]:
        histories = [list(prompt) for prompt in prompts]
        computed = list(cached) if cached is not None else [0] * len(prompts)  # tokens whose KV an earlier run left
        ends = [len(prompt) + new_tokens for prompt in prompts]
        # Tables that interleave and run backwards: neither order nor neighbourhood of blocks may matter.
        width = max(-(-end // block_size) for end in ends) * runner.groups.count
        tables = [[(width - 1 - i) * len(prompts) + row for i in range(width)] for row in range(len(prompts))]
        while any(len(history) < end for history, end in zip(histories, ends, strict=True)):
            rows: list[int] = []
            batch: list[SequenceStep] = []
            prefilling = False
            for row, history in enumerate(histories):
                if len(history) == ends[row]:
                    continue
                if len(history) == len(prompts[row]):
                    if prefilling:
                        continue
                    prefilling = True
                tokens = history[computed[row] : computed[row] + chunk]
                last = computed[row] + len(tokens) == len(history)
                draw = Draw(SamplingParams(temperature=0.0), history, len(prompts[row])) if last else None
                batch.append(SequenceStep(tokens, computed[row], tables[row], draw))
                rows.append(row)
            for row, step, token in zip(rows, batch, runner.run(batch), strict=True):
                computed[row] += len(step.token_ids)
                assert (token is None) == (step.draw is None)
                if token is not None:
                    histories[row].append(token.token_id)
        return [history[len(prompt) :] for history, prompt in zip(histories, prompts, strict=True)]

    return run
