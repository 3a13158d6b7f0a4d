"""Ranks together compute what one rank computes alone. Here they are threads of this process, joined by gloo."""

import gc
import re
import threading
import weakref
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.model.architectures.test_conformance import FAMILY_SHAPES, MISTRAL4
from tests.model.conftest import make_decoder
from twostroke.model.architectures.decoder import Decoder, DecoderWeights
from twostroke.model.backend import LoadOptions
from twostroke.model.cache.kv_cache import KVCache
from twostroke.model.cache.layer_announcer import LaunchedStep
from twostroke.model.cache.memory import GpuMemory
from twostroke.model.checkpoint.config_file import load_model_config
from twostroke.model.checkpoint.decoder_weights import load_decoder_weights
from twostroke.model.checkpoint.tensor_file import WHOLE
from twostroke.model.checkpoint.weights import Checkpoint
from twostroke.model.costs.sizes import COMMUNICATOR_BYTES, CUDA_CONTEXT_BYTES, StepBounds, check_size
from twostroke.model.cpu import mla
from twostroke.model.cpu.backend import CpuBackend
from twostroke.model.engine_config import EngineConfig
from twostroke.model.load import largest_batch, load_engine, measure_gpu
from twostroke.model.parallel.form import ParallelForm, Shard, Stage
from twostroke.model.parallel.ranked_engine import as_on_rank_0, for_ranks
from twostroke.model.parallel.tensor_parallel import (
    ContextParts,
    GroupRanks,
    RankPlace,
    Rendezvous,
    SingleRank,
    TensorParallel,
)
from twostroke.model.runner import ModelRunner
from twostroke.model.sampling.sampler import Sampler
from twostroke.model.step import Draw, SequenceStep
from twostroke.protocol.errors import ConfigError
from twostroke.protocol.requests import SampledToken, SamplingParams

CPU = torch.device("cpu")
BLOCK_SIZE, NUM_BLOCKS = 8, 512
NEW_TOKENS = BLOCK_SIZE + 1  # so that each answer goes over a border of blocks
LENGTHS = (1, 7, 8, 9, 40, 90)

SHAPES: dict[str, dict[str, Any]] = {
    "mha": {"num_key_value_heads": 4},
    "fewer KV heads than ranks": {"num_attention_heads": 8, "num_key_value_heads": 2},
    "one KV head": {"num_key_value_heads": 1},
    "tied, an odd vocabulary": {"tie_word_embeddings": True, "vocab_size": 99},
    "biases": {"attention_bias": True, "mlp_bias": True},
    "fused tensors, heads turned in part": FAMILY_SHAPES["phi4_mini"],
    "norms of heads": FAMILY_SHAPES["qwen3"],
    "windows, two ways to turn": FAMILY_SHAPES["gemma3"]
    | {"num_attention_heads": 4, "num_key_value_heads": 2, "tie_word_embeddings": False},
    "experts": FAMILY_SHAPES["qwen3_moe"],
    "experts and one that all tokens take": FAMILY_SHAPES["qwen2_moe"],
    "stacked experts with biases, sinks": FAMILY_SHAPES["gpt_oss"],
    "chunks, stacked experts whose input is scaled": FAMILY_SHAPES["llama4"],
    "experts of Mixtral": FAMILY_SHAPES["mixtral"],
    "experts and latents": FAMILY_SHAPES["deepseek_v3_experts"],
    "latents and an index": FAMILY_SHAPES["glm_moe_dsa"],
    "delta nets": FAMILY_SHAPES["qwen3_5"]
    | {"num_key_value_heads": 4, "linear_num_key_heads": 4, "linear_num_value_heads": 8},
    "delta nets by key heads": FAMILY_SHAPES["qwen3_next"],
    "Mamba-2 of one group": FAMILY_SHAPES["granite4"] | {"num_attention_heads": 4, "num_key_value_heads": 4},
    "Mamba-2 of two groups, experts without gates": FAMILY_SHAPES["nemotron_h_experts"]
    | {"num_attention_heads": 4, "num_key_value_heads": 4, "n_groups": 2},
    "short convolutions": FAMILY_SHAPES["lfm2"] | {"num_key_value_heads": 4},
    "latents whose queries are scaled": MISTRAL4,
    "wide heads, shared keys, embeddings for each layer": FAMILY_SHAPES["gemma4"],
    "fewer and wider heads, experts beside the MLP": FAMILY_SHAPES["gemma4_large"]
    | {"num_key_value_heads": 8, "per_layer_config": {"3": {"head_dim": 32, "num_key_value_heads": 4}}}
    | {"enable_moe_block": True, "num_experts": 8, "top_k_experts": 2, "moe_intermediate_size": 24},
    "norms of all heads together": FAMILY_SHAPES["olmo2"] | {"num_attention_heads": 8, "hidden_size": 64},
}


class Ranks:
    """Runs each step on all ranks at once. Looks like rank 0's runner."""

    def __init__(self, runners: list[ModelRunner], threads: ThreadPoolExecutor):
        self.runners = runners
        self.groups = runners[0].groups
        self._threads = threads

    def run(self, batch: Sequence[SequenceStep]) -> list[SampledToken | None]:
        others = [as_on_rank_0(for_ranks(step)) for step in batch]
        batches = [batch, *[others] * (len(self.runners) - 1)]
        drawn, *_ = list(self._threads.map(ModelRunner.run, self.runners, batches))
        return drawn


def runner(folder: Path, parallel: TensorParallel, shares_context: bool = False) -> ModelRunner:
    num_blocks = NUM_BLOCKS * load_model_config(folder).kv_groups.count
    decoder, cache = make_decoder(
        folder,
        CpuBackend(),
        num_blocks=num_blocks,
        block_size=BLOCK_SIZE,
        parallel=parallel,
        shares_context=shares_context,
    )
    sampler = Sampler(decoder.vocab_size) if cache.rank == 0 else None
    return ModelRunner(decoder, sampler, cache, load_model_config(folder).max_position, parallel=parallel)


@contextmanager
def ranks(
    folder: Path, size: int, has_whole_experts: bool = False, stages: int = 1, shares_context: bool = False
) -> Iterator[Ranks]:
    """`size` of each of so many stages."""
    rendezvous = Rendezvous("127.0.0.1")

    def join(rank: int) -> GroupRanks:
        shard = Shard(rank % size, size, has_whole_experts)
        return GroupRanks(shard, rendezvous.address, CPU, Stage(rank // size, stages))

    with ThreadPoolExecutor(size * stages) as threads:
        groups = threads.map(join, range(size * stages))
        yield Ranks([runner(folder, group, shares_context) for group in groups], threads)


def sizes_of(shape: str) -> tuple[int, ...]:
    return (2, 4, 8) if SHAPES[shape].get("num_attention_heads") == 8 else (2, 4)


FIRST = {"mha": 4, "fewer KV heads than ranks": 4, "experts": 4}  # of the others, 2 in `make test`
SIZES = [pytest.param(shape, [FIRST.get(shape, 2)], id=shape) for shape in SHAPES] + [
    pytest.param(
        shape,
        [size for size in sizes_of(shape) if size != FIRST.get(shape, 2)],
        id=f"{shape}, more sizes",
        marks=pytest.mark.models,
    )
    for shape in SHAPES
]


@pytest.mark.parametrize(("shape", "sizes"), SIZES)
def test_several_ranks_draw_the_tokens_that_one_draws(
    shape: str, sizes: list[int], write_checkpoint: Any, generate: Any
) -> None:
    folder = write_checkpoint(seed=3, **SHAPES[shape])
    generator = torch.Generator().manual_seed(1)
    prompts = [torch.randint(90, (length,), generator=generator).tolist() for length in LENGTHS]

    def tokens(runner: Any) -> list[list[int]]:
        answers: list[list[int]] = generate(runner, prompts, NEW_TOKENS, chunk=37, block_size=BLOCK_SIZE)
        return answers

    expected = tokens(runner(folder, SingleRank()))
    for size in sizes:
        for has_whole_experts in (False, True)[: 2 if load_model_config(folder).num_experts else 1]:
            with ranks(folder, size, has_whole_experts) as together:
                assert tokens(together) == expected


@pytest.mark.parametrize(
    ("size", "stages"),
    [(2, 1), pytest.param(4, 1, marks=pytest.mark.models), pytest.param(2, 2, marks=pytest.mark.models)],
)
def test_ranks_that_share_the_tokens_of_latents_draw_the_tokens_that_one_draws(
    size: int, stages: int, write_checkpoint: Any, generate: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = write_checkpoint(seed=3, **FAMILY_SHAPES["deepseek_v3_experts"])
    generator = torch.Generator().manual_seed(1)
    prompts = [torch.randint(90, (length,), generator=generator).tolist() for length in LENGTHS]
    monkeypatch.setattr(mla, "PART_TOKENS", 32)  # so that a prompt's context comes in several parts

    def tokens(runner: Any) -> list[list[int]]:
        answers: list[list[int]] = generate(runner, prompts, NEW_TOKENS, chunk=37, block_size=BLOCK_SIZE)
        return answers

    expected = tokens(runner(folder, SingleRank()))
    with ranks(folder, size, True, stages, shares_context=True) as together:
        for one in together.runners:
            assert one._kv_cache.tensors[0].shape[3] == BLOCK_SIZE // size
        assert tokens(together) == expected


@pytest.mark.parametrize(("shape", "shares_context"), [("mha", False), ("experts and latents", True)])
def test_every_rank_copies_its_part_of_a_prompts_end(shape: str, shares_context: bool, write_checkpoint: Any) -> None:
    folder = write_checkpoint(seed=3, **SHAPES[shape])
    prompt = [5 + position for position in range(BLOCK_SIZE + 6)]
    draw = Draw(SamplingParams(temperature=0.0), prompt, len(prompt))
    with ranks(folder, 2, shares_context, shares_context=shares_context) as together:
        (alone,) = together.run([SequenceStep(prompt, 0, [0, 1], draw)])
        (copied,) = together.run([SequenceStep(prompt[-1:], len(prompt) - 1, [0, 2], draw, copied_from=1)])
        assert copied == alone
        for one in together.runners:
            cache = one._kv_cache.tensors[0]
            # One row's product need not be rounded as that of a whole prompt's rows.
            torch.testing.assert_close(cache[2], cache[1], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_results_over_parts_of_a_context_are_merged_at_the_ranks_that_have_the_heads(dtype: torch.dtype) -> None:
    size, tokens, heads, rank = 4, 3, 2, 6
    generator = torch.Generator().manual_seed(0)
    scores = torch.randn(size, tokens, size * heads, 5, generator=generator) * 3
    scores[1, 0], scores[2, 0], scores[3, 0] = -torch.inf, -torch.inf, -torch.inf  # one rank has all of this context
    values = torch.randn(size, 5, rank, generator=generator)
    mixed = torch.einsum("nthk,nkr->nthr", scores.softmax(-1).nan_to_num(), values).to(dtype)
    rendezvous = Rendezvous("127.0.0.1")

    def merged(index: int) -> torch.Tensor:
        parts = ContextParts(GroupRanks(Shard(index, size), rendezvous.address, CPU))
        return parts.merged(mixed[index], scores[index].logsumexp(-1))

    with ThreadPoolExecutor(size) as threads:
        found = torch.cat(list(threads.map(merged, range(size))), dim=1)
    together = scores.permute(1, 2, 0, 3).flatten(2).softmax(-1)
    expected = together @ values.flatten(0, 1)
    assert found.dtype == dtype
    torch.testing.assert_close(found.float(), expected, atol=1e-5 if dtype == torch.float32 else 2e-2, rtol=1e-2)


class TokensOnDevice:
    """Tokens that a sampler has launched, which nobody may wait for before `may_end`."""

    def __init__(self, tokens: torch.Tensor, may_end: threading.Event):
        self.tokens = tokens
        self._may_end = may_end

    def collect(self) -> list[int]:
        assert self._may_end.is_set()
        found: list[int] = self.tokens.tolist()
        return found


class LaunchingSampler(Sampler):
    """Sampler like a GPU's: drawn tokens stay on the device."""

    may_end = threading.Event()

    def launch(self, logits: torch.Tensor, *_: Any) -> Any:
        return TokensOnDevice(logits.argmax(1), self.may_end)

    def take(self, drawn: torch.Tensor, *_: Any) -> Any:
        return TokensOnDevice(drawn[0], self.may_end)


@pytest.mark.parametrize("sampler", [Sampler, LaunchingSampler])
def test_all_ranks_go_on_with_tokens_that_nobody_has_waited_for(sampler: type[Sampler], write_checkpoint: Any) -> None:
    folder = write_checkpoint(seed=3)
    prompts, steps = [[3, 5, 7], [11, 2], [1]], 6
    greedy = SamplingParams(temperature=0.0)

    def batch(step: int) -> list[SequenceStep]:
        """The first one reads all prompts; every later one follows all entries, from the last to the first."""
        found = []
        for i, prompt in enumerate(prompts):
            draw, blocks = Draw(greedy, prompt, len(prompt)), [2 * i, 2 * i + 1]
            start = 0 if step == 0 else len(prompt) + step - 1
            follows = None if step == 0 else len(prompts) - 1 - i
            found.append(SequenceStep(prompt if step == 0 else [0], start, blocks, draw, follows))
        return found if step % 2 == 0 else found[::-1]

    def run(runner: ModelRunner) -> list[LaunchedStep]:
        launched: list[LaunchedStep] = []
        for step in range(steps):
            told = batch(step)
            if runner._parallel.shard.rank:
                told = [as_on_rank_0(for_ranks(one)) for one in told]
            launched.append(runner.launch(told, earlier=launched[-1] if launched else None))
        return launched

    sampler_class, LaunchingSampler.may_end = sampler, threading.Event()
    expected = [step.result() for step in run(runner(folder, SingleRank()))]
    with ranks(folder, 2) as together:
        together.runners[0]._sampler = sampler_class(together.runners[0]._decoder.vocab_size)
        launched, _ = together._threads.map(run, together.runners)
    LaunchingSampler.may_end.set()
    assert [step.result() for step in launched] == expected
    assert len({token.token_id for step in expected for token in step if token is not None}) > 3


def held_bytes(weights: DecoderWeights) -> int:
    """Return the bytes of all projections, the embedding and the LM head."""
    assert weights.ends is not None
    embedding = weights.ends.embedding
    assert isinstance(embedding, torch.Tensor)
    linears = [weights.ends.lm_head]
    for layer in weights.layers:
        assert layer.mlp is not None
        linears += [layer.qkv, layer.output, layer.mlp.gate_up, layer.mlp.down]
    held = [linear.embed(torch.arange(linear.out_features), 0, torch.float32) for linear in linears]
    return sum(tensor.numel() * 4 for tensor in (embedding, *held))


def test_a_rank_holds_its_share_of_the_weights(write_checkpoint: Any) -> None:
    folder = write_checkpoint(num_key_value_heads=4)
    config = load_model_config(folder)
    checkpoint = Checkpoint(folder, config)

    def load(shard: Shard) -> DecoderWeights:
        return load_decoder_weights(checkpoint, config, LoadOptions(torch.float32, CPU, 64), CpuBackend(), shard)

    whole = held_bytes(load(Shard()))
    for size in (2, 4):
        assert [held_bytes(load(Shard(rank, size))) * size for rank in range(size)] == [whole] * size


@pytest.mark.parametrize("shape", ["experts", "stacked experts with biases, sinks"])
def test_a_rank_reads_no_other_experts_than_its_own(
    shape: str, write_checkpoint: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = write_checkpoint(**SHAPES[shape])
    config = load_model_config(folder)
    options, read, named = LoadOptions(torch.float32, CPU, 64), set(), re.compile(r"experts\.(?:(\d+)\.)?\w+_proj")
    weight = Checkpoint.weight

    def reading(checkpoint: Checkpoint, name: str, rows: slice = WHOLE, columns: slice = WHOLE) -> Any:
        if (found := named.search(name)) is not None:
            read.update(range(rows.start, rows.stop) if found[1] is None else {int(found[1])})
        return weight(checkpoint, name, rows, columns)

    monkeypatch.setattr(Checkpoint, "weight", reading)
    for rank in range(4):
        read.clear()
        shard = Shard(rank, 4, has_whole_experts=True)
        load_decoder_weights(Checkpoint(folder, config), config, options, CpuBackend(), shard)
        held = shard.experts(config.num_experts)
        assert read == set(range(held.start, held.stop)) != set()


def test_slices_of_a_checkpoint_are_views_that_read_nothing_else(write_checkpoint: Any) -> None:
    folder = write_checkpoint()
    checkpoint = Checkpoint(folder, load_model_config(folder))
    name = "model.layers.0.mlp.down_proj.weight"
    whole = checkpoint.tensor(name)
    part = checkpoint.tensor(name, slice(2, 5), slice(8, 16))
    assert torch.equal(part, whole[2:5, 8:16])
    assert part.stride() == whole.stride()


def test_experts_are_divided_among_no_more_ranks_than_there_are_and_of_any_size(write_checkpoint: Any) -> None:
    fields = SHAPES["experts"] | {"num_attention_heads": 8, "moe_intermediate_size": 3, "num_experts": 5}
    config = load_model_config(write_checkpoint(**fields))
    check_size(config, 4, has_whole_experts=True)
    with pytest.raises(ConfigError, match=r"tensor_parallel: (?=4 ).*3 features"):
        check_size(config, 4)
    with pytest.raises(ConfigError, match=r"tensor_parallel: (?=8 ).*5 experts"):
        check_size(config, 8, has_whole_experts=True)
    with pytest.raises(ConfigError, match="expert_parallel: the model has no experts"):
        check_size(load_model_config(write_checkpoint()), 2, has_whole_experts=True)


@pytest.mark.parametrize(
    ("size", "fields", "named"),
    [
        (8, {}, "4 attention heads"),
        (2, {"num_attention_heads": 6, "num_key_value_heads": 3, "head_dim": 8}, "3 KV heads"),
        (4, {"intermediate_size": 50}, "50 features"),
        (8, {"num_attention_heads": 8, "vocab_size": 9}, "9 tokens"),
    ],
)
def test_a_model_that_ranks_can_not_share_is_refused_with_both_numbers(
    size: int, fields: dict[str, Any], named: str, write_checkpoint: Any
) -> None:
    config = load_model_config(write_checkpoint(**fields))
    with pytest.raises(ConfigError, match=rf"tensor_parallel: (?={size} ).*{named}"):
        check_size(config, size)


def test_a_gpu_is_measured_behind_the_largest_steps_and_its_communicators_are_counted(
    write_checkpoint: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No GPU here: what is asked of CUDA is recorded."""
    done: list[str] = []
    for name in ("empty_cache", "reset_peak_memory_stats", "synchronize"):
        monkeypatch.setattr(torch.cuda, name, lambda *_: None)
    gc.disable()  # or it might go by itself

    class Left:
        """Memory of an engine before this one, in a cycle."""

        def __init__(self) -> None:
            self.itself = self

    is_left = weakref.ref(Left())
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda _: 1000 if is_left() is None else 40_000)
    monkeypatch.setattr(torch.cuda, "max_memory_reserved", lambda _: 1000 + len(done))
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (done.append("measured"), (50, 80))[1])
    monkeypatch.setattr(
        ModelRunner, "run", lambda _, batch: done.append(f"{sum(len(one.token_ids) for one in batch)} tokens")
    )
    decoder, cache = make_decoder(write_checkpoint(), CpuBackend(), num_blocks=1, block_size=8)
    config = EngineConfig(Path(), parallel=ParallelForm(2, 2), bounds=StepBounds(16, 4), staging_bytes=7)
    try:
        found = measure_gpu(decoder, None, cache, config, 64, 64, SingleRank())
    finally:
        gc.enable()
    assert done == ["16 tokens", "16 tokens", "measured"]
    assert found == GpuMemory(80, 50, 0.9, 1000, 2, 0, 7, 2 * COMMUNICATOR_BYTES)


def test_each_rank_measures_its_largest_step_over_a_cache_of_its_own_heads(
    write_checkpoint: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    heads: list[int] = []

    def measure(
        decoder: Decoder, sampler: Any, kv_cache: KVCache, config: EngineConfig, *contexts_and_parallel: Any
    ) -> GpuMemory:
        runner = ModelRunner(decoder, sampler, kv_cache, 64, parallel=contexts_and_parallel[-1])
        runner.run(largest_batch(config.bounds, kv_cache.block_size, 64))
        heads.append(kv_cache.tensors[0].shape[2])
        kv_cache.close()
        return GpuMemory(CUDA_CONTEXT_BYTES + 2**20, free=2**30, share=1.0, weights=0, peak_step=0)

    # As on a GPU, whose step is measured where the cache has no size.
    monkeypatch.setattr("twostroke.model.load.measure_gpu", measure)
    monkeypatch.setattr("twostroke.model.load.resolve_num_blocks", lambda *_: None)
    folder = write_checkpoint(num_attention_heads=8, num_key_value_heads=4)
    config = EngineConfig(folder, parallel=ParallelForm(2), threads=1, bounds=StepBounds(16, 4))
    rendezvous = Rendezvous("127.0.0.1")
    with ThreadPoolExecutor(2) as threads:
        loaded = list(threads.map(lambda rank: load_engine(config, RankPlace(rank, rendezvous.address)), range(2)))
    assert heads == [2, 2]
    for rank in loaded:
        assert 0 < rank.num_blocks * rank.kv_cache.block_bytes * len(rank.kv_cache.tensors) <= 2**20
        rank.engine.close()
        rank.kv_cache.close()
