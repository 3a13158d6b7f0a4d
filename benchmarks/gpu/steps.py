"""Whole steps of a model on a GPU: prompts, decodes, what the host costs them, and what quantisation gains.

The model's weights are random and made on the GPU: no file is written or read, and none has to fit.
"""

import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from twostroke.benchmarks.gpu.limits import GpuLimits, GpuPlace, LimitRow, Sizes
from twostroke.model.architectures.decoder import Decoder
from twostroke.model.backend import LoadOptions
from twostroke.model.cache.kv_cache import make_kv_cache
from twostroke.model.captured_steps import NOTHING_CAPTURED, StepReplays
from twostroke.model.checkpoint.decoder_weights import load_decoder_weights
from twostroke.model.checkpoint.tensor_file import WHOLE
from twostroke.model.checkpoint.weights import Checkpoint
from twostroke.model.config import ModelConfig, Quantization
from twostroke.model.costs.operations import MachineLimits, decode_work, prefill_work
from twostroke.model.cuda.backend import CudaBackend
from twostroke.model.cuda.graphs import CudaGraphSteps, PromptGraphs, most_rows, step_shapes
from twostroke.model.cuda.sampler import DeviceSampler
from twostroke.model.parallel.tensor_parallel import SingleRank
from twostroke.model.parameters import expected_shapes
from twostroke.model.runner import ModelRunner
from twostroke.model.step import Draw, SequenceStep
from twostroke.protocol.requests import SamplingParams

GREEDY = SamplingParams(temperature=0.0)


class RandomCheckpoint(Checkpoint):
    """Checkpoint without a file: bf16 values made on the device, small enough that nothing overflows."""

    def __init__(self, config: ModelConfig, device: torch.device):
        self.shapes = expected_shapes(config)
        self._device = device
        self._stored = {}

    def tensor(self, name: str, rows: slice = WHOLE, columns: slice = WHOLE) -> Tensor:
        values = torch.empty(self.shapes[name], dtype=torch.bfloat16, device=self._device)
        return values.normal_(0, 0.02) if values.dim() == 2 else values.fill_(1.0)


@dataclass(frozen=True)
class GpuModel:
    """A decoder with its cache, full of random values, and its captured decode steps."""

    runner: ModelRunner
    eager: ModelRunner  # for prompts, the small ones too
    sizes: Sizes

    def prefill(self, tokens: int) -> None:
        """A whole prompt in one step, its token drawn and brought to the host."""
        self.runner.run(self._prompt(tokens))

    def prefill_eagerly(self, tokens: int) -> None:
        """Run a prompt as `prefill` does, without a graph."""
        self.eager.run(self._prompt(tokens))

    def launch_prefill(self, tokens: int) -> None:
        """Launch a prompt as `prefill` does, without waiting for it."""
        self.runner.launch(self._prompt(tokens))

    def _prompt(self, tokens: int) -> list[SequenceStep]:
        prompt = [1 + i % (self.sizes.model.vocab_size - 1) for i in range(tokens)]
        table = range(-(-tokens // self.sizes.block_size))
        return [SequenceStep(prompt, 0, table, Draw(GREEDY, prompt, tokens))]

    def decode(self, batch: int, steps: int) -> None:
        """`steps` decode steps, each launched before the one before it has ended, as the engine does."""
        earlier = None
        for index in range(steps):
            launched = self.runner.launch(self._decodes(batch, index), None, earlier)
            if earlier is not None:
                earlier.result()
            earlier = launched
        if earlier is not None:
            earlier.result()

    def launch_two(self, batch: int) -> None:
        """Two decode steps, without waiting for either."""
        first = self.runner.launch(self._decodes(batch, 0))
        self.runner.launch(self._decodes(batch, 1), None, first)

    def _decodes(self, batch: int, index: int) -> list[SequenceStep]:
        """Each sequence has its own blocks; what is in them doesn't change the speed."""
        position = self.sizes.decode_context + index
        width = -(-(self.sizes.decode_context + self.sizes.decode_steps) // self.sizes.block_size)
        draw = Draw(GREEDY, [1], 1)
        return [
            SequenceStep([1], position, range(row * width, (row + 1) * width), draw, row if index else None)
            for row in range(batch)
        ]


def make_model(sizes: Sizes, place: GpuPlace, quantization: Quantization, max_batch: int) -> GpuModel:
    """Return a model with room for `max_batch` decodes and at least one prompt."""
    config, device = sizes.model, place.device
    backend = CudaBackend(place.target)
    checkpoint = RandomCheckpoint(config, device)
    options = LoadOptions(torch.bfloat16, device, sizes.max_context, quantization)
    weights = load_decoder_weights(checkpoint, config, options, backend)
    decoder = Decoder(config, weights, backend, SingleRank())
    width = -(-(sizes.decode_context + sizes.decode_steps) // sizes.block_size)
    num_blocks = max(max_batch * width, -(-sizes.max_context // sizes.block_size))
    cache = make_kv_cache(
        config,
        num_blocks=num_blocks,
        block_size=sizes.block_size,
        dtype=torch.bfloat16,
        device=device,
        model_digest="",
    )
    for layer in cache.tensors:
        layer.normal_()
    recorder = place.recorder()
    most = most_rows(decoder.parameters_a_layer, announces_layers=False)
    shapes = [shape for shape in step_shapes(max(sizes.prompts), max_batch, most) if not shape.singles]
    prompts = PromptGraphs(decoder, cache, sizes.max_context, shapes, recorder)
    captured = CudaGraphSteps(decoder, cache, sizes.max_context, max_batch, recorder)
    sampler = DeviceSampler(config.vocab_size, device)
    sampler.capture(captured.all_logits, captured.sizes, recorder)
    eager, replaying = (
        ModelRunner(decoder, sampler, cache, sizes.max_context, StepReplays(captured, graphs or NOTHING_CAPTURED))
        for graphs in (None, prompts)
    )
    return GpuModel(replaying, eager, sizes)


GAINS: dict[Quantization, float] = {"int8": 1.6, "int4": 2.3}


def measure_steps(sizes: Sizes, place: GpuPlace, limits: GpuLimits) -> Iterator[LimitRow]:
    """Prompts first, then decodes from the smallest batch on."""
    model = make_model(sizes, place, "none", max(sizes.decode_batches))
    for tokens in sizes.prompts:
        yield _prefill(model, tokens, limits)
    for tokens, predicted in sizes.small_prompts:
        yield from _small_prefill(model, place, tokens, predicted)
    for batch in sizes.decode_batches:
        yield from _decode(model, place, batch, limits)


def measure_quantized(sizes: Sizes, place: GpuPlace, limits: GpuLimits) -> Iterator[LimitRow]:
    """Batch 1, in turns with bf16."""
    kinds: tuple[Quantization, ...] = ("none", *GAINS)
    models = {kind: make_model(sizes, place, kind, 1) for kind in kinds}
    times: dict[Quantization, list[float]] = {kind: [] for kind in kinds}
    for turn in range(sizes.turns + 1):
        for kind, model in models.items():
            step_s = _step_s(model, 1)
            if turn:  # the first warms up
                times[kind].append(step_s)
    for kind, aim in GAINS.items():
        gain = statistics.median(bf16 / ours for bf16, ours in zip(times["none"], times[kind], strict=True))
        work = decode_work(sizes.model, 1, sizes.decode_context + sizes.decode_steps / 2, kind)
        share = work.bytes / limits.read / min(times[kind])
        figure = f"{1 / min(times[kind]):.0f} tokens/s, {share:.2f} of read bandwidth"
        yield LimitRow(f"decode in {kind}, batch 1", gain, aim, figure, "bf16")


def _prefill(model: GpuModel, tokens: int, limits: GpuLimits) -> LimitRow:
    work = prefill_work(model.sizes.model, tokens, "none")
    model.prefill(tokens)
    prefill_s = min(_elapsed_s(lambda: model.prefill(tokens)) for _ in range(model.sizes.turns))
    share = work.operations / prefill_s / limits.gemm
    return LimitRow(f"prefill, {tokens} tokens", share, 0.85, f"{tokens / prefill_s:.0f} tokens/s", "GEMM rate")


def _small_prefill(model: GpuModel, place: GpuPlace, tokens: int, predicted: float) -> list[LimitRow]:
    """Measure small prompts by graphs, where there is one, and eagerly, in turns."""
    kinds = partial(model.prefill, tokens), partial(model.prefill_eagerly, tokens)
    for prefill in kinds:
        prefill()
    times = [[_elapsed_s(prefill) for prefill in kinds] for _ in range(model.sizes.turns)]
    ours_s, eager_s = (min(column) for column in zip(*times, strict=True))
    device_s = place.clock.queued_seconds(lambda: model.launch_prefill(tokens))
    busy = f"{device_s * 1e3:.2f} of {ours_s * 1e3:.2f} ms"
    gain = statistics.median(eager / ours for ours, eager in times)
    return [
        LimitRow(f"GPU busy, prompt of {tokens} tokens", device_s / ours_s, 0.9, busy, "the step", predicted),
        LimitRow(
            f"small prompt, {tokens} tokens", gain, None, f"{ours_s * 1e3:.2f} and {eager_s * 1e3:.2f} ms", "eager"
        ),
    ]


def _decode(model: GpuModel, place: GpuPlace, batch: int, limits: GpuLimits) -> list[LimitRow]:
    sizes = model.sizes
    work = decode_work(sizes.model, batch, sizes.decode_context + sizes.decode_steps / 2, "none")
    _step_s(model, batch)
    step_s = min(_step_s(model, batch) for _ in range(sizes.turns))
    share = work.floor_s(MachineLimits(limits.gemm, limits.read)) / step_s
    # What the host adds: the same two steps, when all of both has been launched before they begin.
    device_s = place.clock.queued_seconds(lambda: model.launch_two(batch)) / 2
    busy = device_s / step_s
    return [
        LimitRow(
            f"decode, batch {batch}", share, 0.85 if batch == 1 else 0.8, f"{batch / step_s:.0f} tokens/s", "floor"
        ),
        LimitRow(f"GPU busy, batch {batch}", busy, 0.98, f"{device_s * 1e3:.2f} of {step_s * 1e3:.2f} ms", "the step"),
    ]


def _step_s(model: GpuModel, batch: int) -> float:
    steps = model.sizes.decode_steps
    return _elapsed_s(lambda: model.decode(batch, steps)) / steps


def _elapsed_s(run: Callable[[], None]) -> float:
    """Return the seconds of a call that ends with a token on the host."""
    begin = time.perf_counter()
    run()
    return time.perf_counter() - begin
