"""Replayed decode steps give what the same steps give eagerly, bit for bit.

Which batches have a graph of their own, and what goes into it and comes out; here nothing is captured.
"""

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from msgspec import structs
from numba import carray
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from tests.model.architectures.test_conformance import FAMILY_SHAPES
from tests.model.conftest import make_decoder
from twostroke.model.architectures.decoder import Decoder
from twostroke.model.batch import make_layouts
from twostroke.model.cache.kv_cache import KVCache
from twostroke.model.captured_steps import DecodeInputs, StepReplays
from twostroke.model.checkpoint.config_file import load_model_config
from twostroke.model.cpu.backend import CpuBackend
from twostroke.model.cpu.captured_steps import CpuCapturedSteps
from twostroke.model.cpu.kernels.launch import Kernel, as_floats, as_integers, taken
from twostroke.model.cpu.linears import is_supported
from twostroke.model.cuda.graphs import CudaGraphSteps, Recorder, batch_sizes
from twostroke.model.runner import ModelRunner
from twostroke.model.sampling.sampler import Sampler
from twostroke.model.step import Draw, SequenceStep
from twostroke.protocol.kv_layout import ONE_GROUP, group_layers
from twostroke.protocol.requests import SamplingParams

CPU = torch.device("cpu")
BLOCK_SIZE = 4
NUM_BLOCKS = 96
MAX_CONTEXT = 60
# Rows of 64 elements at least: compiled loops have another order of addition where an output begins within a few
# vectors of an input, as it may for shorter ones.
WIDE = {"hidden_size": 128, "intermediate_size": 192}
MODELS: dict[str, dict[str, Any]] = {
    "gqa": WIDE,
    "mqa": {**WIDE, "num_key_value_heads": 1},
    "tied": {**WIDE, "tie_word_embeddings": True},
    "odd": {"hidden_size": 200, "intermediate_size": 99, "head_dim": 72},
    "windows, caps, factors": {**FAMILY_SHAPES["gemma2"], **WIDE, "head_dim": 64, "sliding_window": 9},
    "norms of rows": {**FAMILY_SHAPES["olmo3"], **WIDE, "sliding_window": 13},
    "experts, one for all tokens": {**FAMILY_SHAPES["qwen2_moe"], **WIDE, "moe_intermediate_size": 128},
}


@Kernel
def MULTIPLY(words):
    """words: weights, x, out, rows of x, columns; an item is a row of the weights."""
    items, rows, columns = words[1], words[6], words[7]
    weights, x = carray(as_floats(words[3]), (items, columns)), carray(as_floats(words[4]), (rows, columns))
    out = carray(as_floats(words[5]), (rows, items))
    for item in taken(words, items):
        for row in range(rows):
            total = np.float32(0)
            for i in range(columns):
                total += weights[item, i] * x[row, i]
            out[row, item] = total


@Kernel
def LOOK_UP(words):
    """words: table, token ids, out, columns, rows of the table."""
    items, columns = words[1], words[6]
    table, ids = carray(as_floats(words[3]), (words[7], columns)), carray(as_integers(words[4]), (items,))
    out = carray(as_floats(words[5]), (items, columns))
    for item in taken(words, items):
        out[item] = table[ids[item]]


class Backend(CpuBackend):
    """Simple projections in fp32, which can be recorded on any CPU."""

    def make_linear(self, weight: Tensor, bias: Tensor | None, quantization: Any, dtype: Any) -> "Linear":
        return Linear(weight, self)

    def embed(self, token_ids: Tensor, table: Any, first: int, dtype: torch.dtype) -> Tensor:
        weight = table.weight if isinstance(table, Linear) else table
        out = self.launcher.empty((len(token_ids), weight.shape[1]), dtype)
        self.launcher.run(LOOK_UP, len(token_ids), 1, weight, token_ids, out, weight.shape[1], len(weight))
        return out


class Linear:
    def __init__(self, weight: Tensor, backend: Backend):
        self.weight, self.out_features, self.backend = weight, len(weight), backend

    def __call__(self, x: Tensor, out_dtype: torch.dtype | None = None) -> Tensor:
        out = self.backend.launcher.empty((len(x), self.out_features), torch.float32)
        self.backend.launcher.run(MULTIPLY, self.out_features, 5, self.weight, x, out, len(x), x.shape[1])
        return out


def decoder_with_kv(folder: Any, backend: CpuBackend) -> tuple[Decoder, KVCache]:
    groups = load_model_config(folder).kv_groups.count
    decoder, cache = make_decoder(
        folder, backend, num_blocks=NUM_BLOCKS * groups, block_size=BLOCK_SIZE, max_context=MAX_CONTEXT
    )
    for layer in cache.tensors:
        layer.copy_(torch.randn(layer.shape, generator=torch.Generator().manual_seed(3)))
    return decoder, cache


def decodes(rng: random.Random, count: int, groups: int = 1) -> list[SequenceStep]:
    """Decode steps over blocks in any order, which tables may hold more of than they need; of so many groups."""
    free = rng.sample(range(NUM_BLOCKS * groups), NUM_BLOCKS * groups)
    steps = []
    for _ in range(count):
        widest = NUM_BLOCKS // count
        start = rng.randrange(min(MAX_CONTEXT, widest * BLOCK_SIZE))
        table = [free.pop() for _ in range(groups * rng.randint(start // BLOCK_SIZE + 1, widest))]
        sampling = SamplingParams(temperature=rng.choice([0.0, 0.8]), seed=rng.randrange(99), logprobs=3)
        steps.append(SequenceStep([rng.randrange(96)], start, table, Draw(sampling, [1] * (start + 1), 1)))
    return steps


@pytest.mark.parametrize(
    ("model", "threads"), [*((model, 2) for model in MODELS), ("gqa", 1), ("windows, caps, factors", 1)]
)
def test_replayed_steps_equal_eager_ones(write_checkpoint: Callable[..., Any], model: str, threads: int) -> None:
    fields = MODELS[model]
    if "moe_intermediate_size" in fields and not is_supported(torch.float32):
        pytest.skip("on this CPU torch multiplies by experts, and no step of theirs is recorded")
    backend = Backend()
    decoder, cache = decoder_with_kv(write_checkpoint(**fields), backend)
    captured = CpuCapturedSteps(decoder, backend.launcher, cache, MAX_CONTEXT)
    asked: list[int] = []

    class Counting:
        def logits(self, batch: Any, earlier: Tensor | None = None) -> Tensor | None:
            asked.append(len(batch))
            logits = captured.logits(batch)
            assert logits is not None
            return logits

        def mtp_logits(self, drawn: Tensor) -> Tensor:
            return captured.mtp_logits(drawn)

    eager = ModelRunner(decoder, Sampler(96), cache, MAX_CONTEXT)
    replaying = ModelRunner(decoder, Sampler(96), cache, MAX_CONTEXT, StepReplays(Counting()))
    rng = random.Random(5)
    sizes = [1, 2, 64, 7, 1, 32, 2, 63, 1]
    torch.set_num_threads(threads)
    try:
        for size in sizes:
            batch = decodes(rng, size, eager.groups.count)
            before = [layer.clone() for layer in cache.tensors]
            expected = eager.run(batch)
            written = [layer.clone() for layer in cache.tensors]
            for layer, old in zip(cache.tensors, before, strict=True):
                layer.copy_(old)
            assert replaying.run(batch) == expected
            assert all(map(torch.equal, cache.tensors, written))
    finally:
        torch.set_num_threads(1)
    assert asked == sizes


def test_what_is_more_than_a_decode_or_larger_than_the_largest_batch_runs_eagerly(write_checkpoint: Any) -> None:
    backend = Backend()
    decoder, cache = decoder_with_kv(write_checkpoint(), backend)
    captured = CpuCapturedSteps(decoder, backend.launcher, cache, MAX_CONTEXT)
    assert captured.logits(decodes(random.Random(1), 65)) is None

    class Never:
        def logits(self, batch: Any, earlier: Tensor | None = None) -> Tensor | None:
            raise AssertionError(batch)

    runner = ModelRunner(decoder, Sampler(96), cache, MAX_CONTEXT, StepReplays(Never()))
    draw = Draw(SamplingParams(temperature=0.0), [1, 2], 2)
    decode = SequenceStep([1], 3, [0], draw)
    layers: list[int] = []
    assert None not in runner.run([decode, SequenceStep([1, 2], 0, [1], draw)])  # beside a prompt
    assert runner.run([SequenceStep([1], 0, [1], None)]) == [None]  # a chunk that ends no prompt
    assert None not in runner.run([decode], layers.append)  # somebody waits for its layers
    assert layers == [0, 1]


def test_without_projections_that_can_be_recorded_all_steps_are_eager(
    write_checkpoint: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    backend = Backend()
    monkeypatch.setattr(Linear, "__call__", lambda self, x, out_dtype=None: x @ self.weight.T)
    decoder, cache = decoder_with_kv(write_checkpoint(), backend)
    captured = CpuCapturedSteps(decoder, backend.launcher, cache, MAX_CONTEXT)
    batch = decodes(random.Random(1), 3)
    assert captured.logits(batch) is None
    runner = ModelRunner(decoder, Sampler(96), cache, MAX_CONTEXT, StepReplays(captured))
    assert None not in runner.run(batch)


def test_all_programs_share_the_largest_ones_memory(write_checkpoint: Any) -> None:
    backend = Backend()
    decoder, cache = decoder_with_kv(write_checkpoint(), backend)
    captured = CpuCapturedSteps(decoder, backend.launcher, cache, MAX_CONTEXT)
    room = backend.launcher.arena.num_bytes
    for size in range(1, 65):
        captured.logits(decodes(random.Random(size), size))
    assert backend.launcher.arena.num_bytes == backend.launcher.arena.free_bytes == room


def test_inputs_hold_contexts_up_to_the_longest() -> None:
    inputs, rng = DecodeInputs(4, 16, BLOCK_SIZE), random.Random(2)
    first, second = decodes(rng, 2)
    assert inputs.hold([structs.replace(first, start=15), structs.replace(second, start=0)])
    assert not inputs.hold([structs.replace(first, start=0), structs.replace(second, start=16)])


@pytest.mark.parametrize("local_tokens", [None, range(0, BLOCK_SIZE // 2), range(BLOCK_SIZE // 2, BLOCK_SIZE)])
def test_inputs_are_those_of_a_layout(local_tokens: range | None) -> None:
    rng = random.Random(2)
    inputs = DecodeInputs(64, MAX_CONTEXT, BLOCK_SIZE, local_tokens=local_tokens)
    names = ["positions", "slots", "query_starts", "context_lens"] + ["local_lens"] * (local_tokens is not None)
    for size in (64, 3, 17, 1):
        batch = decodes(rng, size)
        inputs.fill(batch)
        (mine,), (expected,) = inputs.layouts(size), make_layouts(batch, BLOCK_SIZE, CPU, ONE_GROUP, local_tokens)
        for name in names:
            assert torch.equal(getattr(mine, name), getattr(expected, name)), name
            assert getattr(mine, name).dtype == getattr(expected, name).dtype, name
        for row, context in enumerate(expected.context_lens.tolist()):
            used = -(-context // BLOCK_SIZE)
            assert torch.equal(mine.block_tables[row, :used], expected.block_tables[row, :used])
        assert inputs.token_ids[:size].tolist() == [step.token_ids[0] for step in batch]
        assert mine.num_decodes == size


def test_a_layer_whose_rows_are_several_blocks_has_them_in_turn() -> None:
    """Two of three layers have a window and two blocks a row, the third has one."""
    windows, parts = (20, 20, 0, 20, 20), (0, 1, 0, 0, 1)
    groups = group_layers(windows, parts)
    assert groups.tables == ((0,), (1, 3), (2, 4))
    assert groups.tensor_of_layer == (0,) * 5
    table = list(range(15))  # of three rows
    batch = [SequenceStep([7], 11, table, None), SequenceStep([8], 3, table[:5], None)]
    inputs = DecodeInputs(2, MAX_CONTEXT, BLOCK_SIZE, groups=groups)
    inputs.fill(batch)
    for layouts in (inputs.layouts(2), make_layouts(batch, BLOCK_SIZE, CPU, groups)):
        assert [layout.block_tables[0, :6].tolist() for layout in layouts[1:]] == [
            [1, 3, 6, 8, 11, 13],
            [2, 4, 7, 9, 12, 14],
        ]
        assert layouts[0].block_tables[0, :3].tolist() == [0, 5, 10]
        # Blocks of the layers with a window have two tokens, of which both sequences bring the second of a row's end.
        assert [layout.slots.tolist() for layout in layouts] == [[43, 3], [27, 7], [29, 9]]


class NoEvent:
    def record(self) -> None:
        pass

    def synchronize(self) -> None:
        pass


class Repeating(Recorder):
    """Its graphs are the functions themselves."""

    def __init__(self) -> None:
        pass

    def record(self, run: Callable[[], None]) -> Callable[[], None]:
        run()
        return run

    def event(self) -> NoEvent:
        return NoEvent()


@pytest.fixture(scope="module")
def runners(write_checkpoint: Callable[..., Any]) -> tuple[ModelRunner, ModelRunner, CudaGraphSteps]:
    """One that runs eagerly and one with graphs, over the same cache; and the latter's graphs."""
    decoder, cache = decoder_with_kv(write_checkpoint(), CpuBackend())
    captured = CudaGraphSteps(decoder, cache, MAX_CONTEXT, 12, Repeating())
    sampler = Sampler(96)
    return (
        ModelRunner(decoder, sampler, cache, MAX_CONTEXT),
        ModelRunner(decoder, sampler, cache, MAX_CONTEXT, StepReplays(captured)),
        captured,
    )


@pytest.mark.parametrize("count", [1, 2, 3, 8, 9, 12, 13])
def test_padded_batches_draw_what_eager_ones_do(
    runners: tuple[ModelRunner, ModelRunner, CudaGraphSteps], count: int
) -> None:
    eager, replaying, captured = runners
    rng = random.Random(count)
    for _ in range(3):
        batch = decodes(rng, count)
        drawn = [token.token_id for token in replaying.run(batch) if token is not None]
        assert drawn == [token.token_id for token in eager.run(batch) if token is not None]
    assert (captured.logits(batch) is None) == (count > 12)


def test_tokens_that_follow_come_from_the_step_before(
    runners: tuple[ModelRunner, ModelRunner, CudaGraphSteps],
) -> None:
    captured = runners[2]
    known = decodes(random.Random(0), 7)
    earlier = torch.tensor([50, 51, 52, 53])
    follows = [None, 3, None, 1, 0, 1, 2]
    unknown = [
        SequenceStep([0] if one is not None else step.token_ids, step.start, step.block_ids, step.draw, one)
        for step, one in zip(known, follows, strict=True)
    ]
    told = [
        SequenceStep([50 + one] if one is not None else step.token_ids, step.start, step.block_ids, step.draw)
        for step, one in zip(known, follows, strict=True)
    ]
    with torch.inference_mode():
        logits = captured.logits(unknown, earlier)
        assert logits is not None
        expected = logits.clone()
        again = captured.logits(told)
        assert again is not None
        assert torch.equal(again, expected)


def test_tables_that_grow_are_written_as_whole_ones_are_whoever_comes_and_goes() -> None:
    """Only the new end of a list that was there before is looked at."""
    rng, kept, num_read = random.Random(2), DecodeInputs(8, MAX_CONTEXT, BLOCK_SIZE), [0]

    class Blocks(list[int]):
        def __getitem__(self, part: Any) -> Any:
            num_read[0] += len(range(len(self))[part])
            return super().__getitem__(part)

    running: list[tuple[Blocks, int]] = []
    few = 0
    for number in range(200):
        running = [(blocks, start + 1) for blocks, start in running if start + 1 < MAX_CONTEXT and rng.random() > 0.01]
        if (len(running) < 8 and rng.random() < 0.1) or not running:
            start = rng.randrange(40)
            running.insert(0, (Blocks(rng.sample(range(NUM_BLOCKS), start // BLOCK_SIZE + 1)), start))
        for blocks, start in running:
            while len(blocks) <= start // BLOCK_SIZE + rng.randrange(2):
                blocks.append(rng.randrange(NUM_BLOCKS))
        batch = [SequenceStep([number], start, blocks, None) for blocks, start in running]
        num_read[0] = 0
        kept.fill(batch)
        few += num_read[0] <= len(batch)
        fresh = DecodeInputs(8, MAX_CONTEXT, BLOCK_SIZE)
        fresh.fill([SequenceStep([number], start, list(blocks), None) for blocks, start in running])
        assert torch.equal(kept.slots[:, : len(running)], fresh.slots[:, : len(running)])
        for row, (_, start) in enumerate(running):
            used = start // BLOCK_SIZE + 1
            assert torch.equal(kept.block_tables[0][row, :used], fresh.block_tables[0][row, :used])
    assert few > 150


class Launches(TorchDispatchMode):
    """Notes the operations that torch is asked for, views aside: each is a launch or a copy on a GPU."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, operation: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not operation.is_view:
            self.names.append(operation.name())
        return operation(*args, **(kwargs or {}))


class Silent(Repeating):
    """Its graphs are one launch, and no operation of torch's."""

    def record(self, run: Callable[[], None]) -> Callable[[], None]:
        run()
        return lambda: None


def test_a_replayed_step_asks_for_one_copy_and_few_more_for_new_tokens_and_new_blocks(
    write_checkpoint: Callable[..., Any],
) -> None:
    decoder, cache = decoder_with_kv(write_checkpoint(), CpuBackend())
    captured = CudaGraphSteps(decoder, cache, MAX_CONTEXT, 12, Silent())
    drawn = torch.tensor([1, 2, 3])

    def step(start: int, blocks: list[int], follows: int | None = None) -> SequenceStep:
        return SequenceStep([5], start, blocks, Draw(SamplingParams(), [], 0), follows)

    def launches(batch: list[SequenceStep], earlier: Tensor | None = None) -> int:
        with torch.inference_mode(), Launches() as noted:
            assert captured.logits(batch, earlier) is not None
        return len(noted.names)

    assert launches([step(1, [3]), step(2, [4])]) == 4, "inputs, and tables by way of their entries in use"
    assert launches([step(2, [3], 1), step(3, [4], 0)], drawn) == 2, "inputs, and the tokens of the step before"
    assert launches([step(3, [3]), step(BLOCK_SIZE, [4, 5])]) == 4
    assert launches([step(3, [3])]) == 1, "the first row's table is there"


@pytest.mark.parametrize("largest", [1, 3, 8, 9, 60, 100, 256, 1000])
def test_every_batch_finds_a_graph_that_is_little_larger(largest: int) -> None:
    sizes = batch_sizes(largest)
    assert sizes == sorted(set(sizes))
    assert sizes[-1] == largest
    for count in range(9, largest + 1):
        size = next(size for size in sizes if size >= count)
        assert size <= max(count + 7, 1.25 * count)
