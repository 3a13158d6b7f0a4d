"""Decode steps on CUDA: captured, launched ahead, drawn on the device; and the engine around them, beside a CPU's."""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import pytest
import torch

from tests.model.conftest import make_decoder
from tests.rigs.engine_runner import greedy_tokens
from twostroke.model.architectures.decoder import Decoder
from twostroke.model.batch import Drawing, StepInput, make_layout
from twostroke.model.cache.kv_cache import KVCache
from twostroke.model.cache.swap_space import SwapSpace
from twostroke.model.captured_steps import ALL_EAGER, StepReplays
from twostroke.model.config import Quantization
from twostroke.model.cuda.graphs import CudaGraphSteps, PromptGraphs, Recorder, batch_sizes, step_shapes
from twostroke.model.engine_config import EngineConfig
from twostroke.model.load import LoadedEngine, load_engine
from twostroke.model.runner import ModelRunner
from twostroke.model.sampling.sampler import DrawBatch, TorchSampling, row_keys
from twostroke.model.step import BlockCopy, Draw, SequenceStep
from twostroke.protocol.errors import ConfigError
from twostroke.protocol.requests import SamplingParams

if TYPE_CHECKING:
    from twostroke.model.cuda.backend import CudaBackend

pytestmark = pytest.mark.gpu
BLOCK_SIZE = 64
MAX_CONTEXT = 1024
MOST = 40  # sequences
WIDE = {"hidden_size": 512, "intermediate_size": 1024, "num_attention_heads": 8, "num_key_value_heads": 2}
VOCAB = 96
SAMPLINGS = [
    SamplingParams(temperature=0.0),
    SamplingParams(temperature=0.8, seed=3),
    SamplingParams(temperature=1.2, seed=4, top_k=7, top_p=0.8),
    SamplingParams(temperature=0.9, seed=5, min_p=0.1),
]


@pytest.fixture
def folder(write_checkpoint: Callable[..., Path]) -> Path:
    return write_checkpoint(seed=2, dtype=torch.bfloat16, head_dim=64, **WIDE)


@pytest.fixture
def made(folder: Path, backend: "CudaBackend") -> tuple[Decoder, KVCache]:
    """Return a decoder in bf16, over a cache of random values."""
    decoder, cache = make_decoder(
        folder,
        backend,
        num_blocks=MOST * MAX_CONTEXT // BLOCK_SIZE // 4,
        block_size=BLOCK_SIZE,
        max_context=MAX_CONTEXT,
        dtype=torch.bfloat16,
        device=torch.device("cuda", torch.cuda.current_device()),
    )
    for layer in cache.tensors:
        layer.normal_()
    return decoder, cache


def decodes(count: int, offset: int, tokens: Sequence[int] | None) -> list[SequenceStep]:
    """Sequences at different positions in their own blocks; without tokens they follow the step before."""
    steps = []
    for row in range(count):
        position = 1 + (97 * row) % (3 * BLOCK_SIZE) + offset
        draw = Draw(SAMPLINGS[row % len(SAMPLINGS)], [1], 1)
        table = range(4 * row, 4 * row + 4)
        token = (row,) if tokens is None else (tokens[row],)
        steps.append(SequenceStep(token, position, table, draw, row if tokens is None else None))
    return steps


def runner_of(made: tuple[Decoder, KVCache], *, is_captured: bool) -> ModelRunner:
    from twostroke.model.cuda.sampler import DeviceSampler

    decoder, cache = made
    replays = StepReplays(CudaGraphSteps(decoder, cache, MAX_CONTEXT, MOST)) if is_captured else ALL_EAGER
    return ModelRunner(decoder, DeviceSampler(VOCAB, cache.tensors[0].device), cache, MAX_CONTEXT, replays)


def test_captured_steps_have_the_bits_of_eager_ones(made: tuple[Decoder, KVCache]) -> None:
    """Sizes have a graph: rows beside a row may only decide the choice of the kernel."""
    decoder, cache = made
    device = cache.tensors[0].device
    captured = CudaGraphSteps(decoder, cache, MAX_CONTEXT, MOST)
    for count in batch_sizes(MOST):
        batch = decodes(count, 0, [row % VOCAB for row in range(count)])
        with torch.inference_mode():
            logits = captured.logits(batch)
            assert logits is not None
            found = logits.clone()
            kv = [layer.clone() for layer in cache.tensors]
            # As the graph has it: contexts are split by the longest to come.
            layout = replace(make_layout(batch, BLOCK_SIZE, device), max_context_len=MAX_CONTEXT)
            tokens = torch.tensor([step.token_ids[0] for step in batch], device=device)
            rows = torch.arange(count, device=device)
            expected = decoder.forward(StepInput(tokens, [layout], cache.tensors, Drawing(rows, rows)))
        assert expected is not None
        assert torch.equal(found, expected)
        assert all(torch.equal(one, other) for one, other in zip(kv, cache.tensors, strict=True))


def test_padded_batches_are_close_to_eager_ones(made: tuple[Decoder, KVCache]) -> None:
    greedy = Draw(SAMPLINGS[0], [1], 1)
    eager, replaying = (runner_of(made, is_captured=is_captured) for is_captured in (False, True))
    for count in (3, 5, 7, 11, 29, MOST):
        batch = [
            SequenceStep(step.token_ids, step.start, step.block_ids, greedy)
            for step in decodes(count, 1, [row % VOCAB for row in range(count)])
        ]
        pairs = list(zip(eager.run(batch), replaying.run(batch), strict=True))
        assert sum(one == other for one, other in pairs) >= 0.9 * count  # a tie of bf16 may go either way


def test_small_steps_with_prompts_by_graphs_are_close_to_eager_ones(made: tuple[Decoder, KVCache]) -> None:
    decoder, cache = made
    device = cache.tensors[0].device
    graphs = PromptGraphs(decoder, cache, MAX_CONTEXT, step_shapes(2048, MOST, 384), Recorder(device))
    for singles, prompts in ((0, (5,)), (0, (300,)), (3, (70, 9)), (7, (100, 1 + 2 * BLOCK_SIZE)), (20, (31,))):
        steps = decodes(singles, 1, [row % VOCAB for row in range(singles)])
        for index, length in enumerate(prompts):
            table = range(4 * singles + 8 * index, 4 * singles + 8 * index + 8)
            tokens = [1 + (row * 5 + index) % 90 for row in range(length)]
            steps.append(SequenceStep(tokens, 30 * index, table, Draw(SAMPLINGS[0], tokens, length)))
        lengths = torch.tensor([len(step.token_ids) for step in steps])
        last, each = (lengths.cumsum(0) - 1).to(device), torch.arange(len(steps), device=device)
        token_ids = torch.tensor([token for step in steps for token in step.token_ids], device=device)
        with torch.inference_mode():
            layout = make_layout(steps, BLOCK_SIZE, device)
            expected = decoder.forward(StepInput(token_ids, [layout], cache.tensors, Drawing(last, each)))
            assert expected is not None
            kv = [layer.clone() for layer in cache.tensors]
            found = graphs.logits(steps, range(len(steps)), None)
            assert found is not None
        assert torch.allclose(found, expected, rtol=0.05, atol=0.15)
        for before, after in zip(kv, cache.tensors, strict=True):
            assert torch.allclose(after.float(), before.float(), rtol=0.05, atol=0.15)


@pytest.mark.parametrize("is_captured", [False, True])
def test_steps_launched_ahead_draw_what_steps_one_by_one_do(made: tuple[Decoder, KVCache], is_captured: bool) -> None:
    for count in (1, 6, 32):
        answers = []
        for is_ahead in (False, True):
            for layer in made[1].tensors:
                layer.fill_(0.25)
            runner = runner_of(made, is_captured=is_captured)
            tokens: list[int] = [row % VOCAB for row in range(count)]
            drawn: list[list[int]] = []
            earlier = runner.launch(decodes(count, 0, tokens))
            for index in range(1, 8):
                if is_ahead:
                    following = runner.launch(decodes(count, index, None), None, earlier)
                    drawn.append([token.token_id for token in earlier.result() if token is not None])
                else:
                    drawn.append([token.token_id for token in earlier.result() if token is not None])
                    following = runner.launch(decodes(count, index, drawn[-1]))
                earlier = following
            answers.append(drawn)
        assert answers[0] == answers[1]


def test_a_step_that_draws_nothing_ends_when_its_keys_and_values_are_there(made: tuple[Decoder, KVCache]) -> None:
    runner, stream = runner_of(made, is_captured=False), torch.cuda.Stream()  # type: ignore[no-untyped-call]
    chunk = SequenceStep([1 + row % 90 for row in range(200)], 0, range(4), None)
    for layer in made[1].tensors:
        layer.zero_()
    runner.run([chunk])
    expected = made[1].tensors[-1][:4].cpu()
    for layer in made[1].tensors:
        layer.zero_()
    launched = runner.launch([chunk])
    assert not launched.is_done
    assert launched.result() == [None]
    with torch.cuda.stream(stream):  # which waits for no other, as KV transfers' don't
        found = made[1].tensors[-1][:4].cpu()
    assert torch.equal(found, expected)


def test_the_device_draws_what_the_reference_does_over_all_parameters() -> None:
    from tests.kernels.steps.test_device_sampling import parameters_of
    from twostroke.model.cuda.kernels.device_sampling import draw_on_device

    cases = [
        (temperature, top_k, top_p, min_p)
        for temperature in (0.1, 1.0, 3.0)
        for top_k in (0, 1, 40, 5000)
        for top_p in (1.0, 0.95, 0.3, 1e-6)
        for min_p in (0.0, 0.05, 1.0)
    ]
    rows, device = len(cases), "cuda"
    temperature, top_k, top_p, min_p = (np.array(column) for column in zip(*cases, strict=True))
    for vocab, grain in ((97, 0.0), (32000, 0.0), (128256, 0.0), (128256, 0.25)):
        logits = torch.randn((rows, vocab), generator=torch.Generator().manual_seed(vocab)) * 3
        if grain:  # many equal ones
            logits = (logits / grain).round() * grain
        keys = row_keys(np.arange(rows, dtype=np.uint64), np.full(rows, 7, np.uint64))
        batch = DrawBatch(np.arange(rows), temperature, top_k.astype(np.int64), top_p, min_p, keys)
        reference = TorchSampling()
        best = reference.argmax(logits)[0]
        # On the CPU: the order in which a GPU adds is its own.
        expected = np.concatenate([reference.draw(logits, best[part.rows], part) for part in in_parts(batch, 24)])
        tokens, broken = draw_on_device(logits.to(device), parameters_of(batch, device))
        assert not broken.any()
        # A token whose mass ends where top_p cuts, to the last bit, may fall on either side.
        assert (tokens.cpu().numpy() != expected).sum() <= 1


@pytest.mark.parametrize("rows", [1, 64])
def test_draws_are_captured_in_a_graph_and_follow_its_inputs(rows: int) -> None:
    from tests.kernels.steps.test_device_sampling import parameters_of
    from twostroke.model.cuda.kernels.device_sampling import draw_on_device

    logits = torch.randn((2, rows, 128256), generator=torch.Generator().manual_seed(rows)).to("cuda") * 3
    keys = row_keys(np.arange(rows, dtype=np.uint64), np.full(rows, 7, np.uint64))
    top_k, top_p, min_p = np.arange(rows) % 3 * 40, np.full(rows, 0.9), np.zeros(rows)
    parameters = parameters_of(DrawBatch(np.arange(rows), np.ones(rows), top_k, top_p, min_p, keys), "cuda")
    expected = [draw_on_device(one, parameters) for one in logits]
    given, graph = logits[0].clone(), torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        drawn = draw_on_device(given, parameters)
    for one, tokens in zip(logits, expected, strict=True):
        given.copy_(one)
        graph.replay()
        assert torch.equal(drawn, tokens)


def in_parts(batch: DrawBatch, size: int) -> list[DrawBatch]:
    fields: tuple[Any, ...] = (batch.rows, batch.temperature, batch.top_k, batch.top_p, batch.min_p, batch.keys)
    return [DrawBatch(*(field[first : first + size] for field in fields)) for first in range(0, len(batch.rows), size)]


def test_swapped_blocks_come_back_as_they_were(made: tuple[Decoder, KVCache]) -> None:
    cache = made[1]
    before = [layer.clone() for layer in cache.tensors]
    space = SwapSpace(cache, 50)
    rng = np.random.default_rng(0)
    out, host = rng.permutation(cache.num_blocks)[:45].tolist(), rng.permutation(50)[:45].tolist()
    back = rng.permutation(cache.num_blocks)[:45].tolist()
    space.copy(BlockCopy(True, out, host))
    for layer in cache.tensors:
        layer[out] = float("nan")
    space.copy(BlockCopy(False, back, host))
    for layer, was in zip(cache.tensors, before, strict=True):
        assert torch.equal(layer[back], was[out])
    del space  # lets go of pinned memory, which goes back to the system
    torch.cuda.synchronize()
    for layer, was in zip(cache.tensors, before, strict=True):
        layer.copy_(was)


def test_an_engine_keeps_to_its_share_of_the_memory(folder: Path) -> None:
    torch.cuda.empty_cache()  # of other tests
    free, total = torch.cuda.mem_get_info()
    share = 0.3
    if free < 0.6 * total:
        pytest.skip("others hold much of this GPU")
    loaded = load_engine(EngineConfig(folder, device="cuda", block_size=BLOCK_SIZE, gpu_memory_share=share))
    try:
        history = [1 + row % 90 for row in range(loaded.max_context - 1)]
        draw = Draw(SamplingParams(temperature=1.0, logprobs=20), history, len(history))
        table = range(-(-loaded.max_context // BLOCK_SIZE))
        asyncio.run(loaded.engine.step([SequenceStep(history, 0, table, draw)]))
        taken = free - torch.cuda.mem_get_info()[0]
        assert taken <= share * total
        assert taken >= 0.9 * share * total, "room was left unused"
    finally:
        loaded.engine.close()


def test_a_gpu_without_room_says_so_in_one_line(folder: Path) -> None:
    with pytest.raises(ConfigError, match="too little memory on cuda"):
        load_engine(EngineConfig(folder, device="cuda", block_size=BLOCK_SIZE, gpu_memory_share=0.001))


@pytest.mark.parametrize("quantization", ["int8", "int4"])
def test_quantised_engines_prefer_tokens_as_bf16_does(folder: Path, quantization: Quantization) -> None:
    """Preference is compared by log-probabilities of a prompt's likeliest tokens."""
    prompt = [3 + row % 80 for row in range(150)]

    def likeliest(kind: Quantization) -> dict[int, float]:
        loaded = load_engine(
            EngineConfig(folder, device="cuda", quantization=kind, block_size=BLOCK_SIZE, num_blocks=32)
        )
        try:
            return asyncio.run(top_of(loaded, prompt))
        finally:
            loaded.engine.close()

    plain, quantised = likeliest("none"), likeliest(quantization)
    shared = plain.keys() & quantised.keys()
    assert len(shared) >= 12
    limit = 0.15 if quantization == "int8" else 1.0
    assert np.mean([abs(plain[token] - quantised[token]) for token in shared]) < limit


async def top_of(loaded: LoadedEngine, prompt: list[int]) -> dict[int, float]:
    draw = Draw(SamplingParams(temperature=0.0, logprobs=20), prompt, len(prompt))
    (drawn,) = await loaded.engine.step([SequenceStep(prompt, 0, range(4), draw)])
    assert drawn is not None
    return dict(drawn.top)


NUM_BLOCKS = 64
NEW_TOKENS = 24
DEVICES: tuple[Literal["cuda", "cpu"], ...] = ("cuda", "cpu")


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"num_key_value_heads": 4},
        {"num_attention_heads": 6, "num_key_value_heads": 1, "hidden_size": 96, "head_dim": 80},
    ],
    ids=["grouped", "multi-head", "multi-query, head_dim 80"],
)
def test_greedy_tokens_on_cuda_equal_those_on_a_cpu(
    write_checkpoint: Callable[..., Path], generate: Callable[..., list[list[int]]], fields: dict[str, int]
) -> None:
    pytest.importorskip("numba", reason="the CPU's engine needs it, a GPU's doesn't")
    folder = write_checkpoint(seed=1, **fields)
    generator = torch.Generator().manual_seed(0)
    prompts = [torch.randint(0, 96, (n,), generator=generator).tolist() for n in (1, 15, 33, 200)]
    on_gpu, on_cpu = (
        greedy_tokens(
            EngineConfig(folder, device=device, dtype="float32", block_size=16, num_blocks=NUM_BLOCKS),
            *(generate, prompts, NEW_TOKENS, 37),
        )
        for device in DEVICES
    )
    assert on_gpu == on_cpu
