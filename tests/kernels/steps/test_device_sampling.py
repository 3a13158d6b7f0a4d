"""Sampling on the GPU draws what the reference draws."""

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from llguidance import LLMatcher, LLTokenizer
from torch import Tensor

from tests.model.conftest import draw_batch, make_decoder
from tests.rigs.gpu_dry_run import Repeating
from twostroke.model import load
from twostroke.model.costs.sizes import StepBounds
from twostroke.model.cpu.backend import CpuBackend
from twostroke.model.cuda.kernels import device_sampling
from twostroke.model.cuda.kernels.device_sampling import (
    DrawParameters,
    SamplingFeatures,
    draw_on_device,
    mask_on_device,
)
from twostroke.model.cuda.sampler import MAX_CAPTURED_ROWS, DeviceSampler
from twostroke.model.engine_config import EngineConfig
from twostroke.model.parallel.form import ParallelForm
from twostroke.model.runner import ModelRunner
from twostroke.model.sampling.sampler import DrawBatch, Sampler, TorchSampling
from twostroke.model.sampling.token_masks import TokenMasks
from twostroke.model.step import BrokenLogits, Constraint, Draw, RowFault, SequenceStep
from twostroke.protocol.requests import SamplingParams

pytestmark = pytest.mark.usefixtures("interpreter")

FILTERS = [
    (0, 1.0, 0.0), (1, 1.0, 0.0), (50, 1.0, 0.0), (0, 0.9, 0.0), (0, 1e-6, 0.0), (0, 1.0, 0.1), (0, 1.0, 1.0),
    (900, 0.7, 0.01), (5000, 0.5, 0.0), (3, 0.99, 0.5),
]  # fmt: skip


def parameters_of(batch: DrawBatch, device: str = "cpu") -> DrawParameters:
    return DrawParameters(
        temperature=torch.tensor(batch.temperature, dtype=torch.float64, device=device),
        top_k=torch.tensor(batch.top_k, dtype=torch.int32, device=device),
        top_p=torch.tensor(batch.top_p, dtype=torch.float64, device=device),
        log_min_p=torch.tensor(batch.min_p, dtype=torch.float64, device=device).log(),
        keys=torch.from_numpy(batch.keys.view(np.int64)).to(device),
    )


@pytest.mark.parametrize("grain", [0.0, 0.25], ids=["distinct", "many equals"])
@pytest.mark.parametrize(
    ("vocab_size", "filters"),
    [
        *((97, filters) for filters in FILTERS),
        (1, (0, 0.5, 0.0)),
        (3000, (50, 1.0, 0.0)),
        (3000, (0, 0.9, 0.01)),
        (9000, (0, 1.0, 0.0)),
        (3000, (900, 0.99, 0.0)),
    ],
)
def test_draws_are_the_references(vocab_size: int, filters: tuple[int, float, float], grain: float) -> None:
    logits = torch.randn((4, vocab_size), generator=torch.Generator().manual_seed(vocab_size)) * 3
    if grain:
        logits = (logits / grain).round() * grain
    batch, reference = draw_batch(4, filters, seed=5), TorchSampling()
    expected = reference.draw(logits, reference.argmax(logits)[0], batch)
    tokens, broken = draw_on_device(logits, parameters_of(batch))
    assert tokens.tolist() == expected.tolist()
    assert broken.tolist() == [0] * 4


def reference_tokens(logits: Tensor, batch: DrawBatch) -> list[int]:
    reference = TorchSampling()
    tokens: list[int] = reference.draw(logits, reference.argmax(logits)[0], batch).tolist()
    return tokens


def shaped(shape: str, rows: int, vocab_size: int) -> Tensor:
    """Logits that are hard on a radix select: where a cut lies says nothing of where the next one does."""
    logits = torch.randn((rows, vocab_size), generator=torch.Generator().manual_seed(vocab_size))
    match shape:
        case "all equal":
            return torch.full_like(logits, 2.5)
        case "two values":
            return (logits > 0.5).float() * 3
        case "next to each other":  # neighbours among floats, so that the last digit decides
            return torch.tensor(1.5).view(torch.int32).add((logits * 40).int()).view(torch.float32)
        case "around zero":  # of either sign, and both zeros
            logits = logits * torch.tensor(10.0) ** -(torch.arange(vocab_size) % 40)
            logits[:, ::7], logits[:, 1::7] = 0.0, -0.0
            return logits
        case "both zeros":
            return torch.zeros_like(logits).index_fill(1, torch.arange(1, vocab_size, 3), -0.0)
        case "far apart":
            return logits * 1e6
        case "huge":
            return logits.sign() * 3e37 * logits.abs().clamp(0.1, 3)
        case "mostly masked":
            masked = torch.full_like(logits, -torch.inf)
            masked[:, 5::997] = logits[:, 5::997]
            return masked
        case "one left":
            masked = torch.full_like(logits, -torch.inf)
            masked[:, vocab_size - 1] = -1e4
            return masked
    raise AssertionError(shape)


@pytest.mark.parametrize(
    "shape",
    [
        "all equal", "two values", "both zeros", "next to each other", "around zero", "far apart", "huge",
        "mostly masked", "one left",
    ],
)  # fmt: skip
def test_draws_are_the_references_over_logits_of_any_shape(shape: str) -> None:
    filters = [(3, 1.0, 0.0), (0, 0.002, 0.0), (0, 0.5, 0.0), (0, 1 - 2**-53, 0.0), (700, 0.6, 0.01), (2999, 0.0, 0.0)]
    filters += [(7, 0.99, 0.0), (2500, 1.0, 0.0)]
    logits = shaped(shape, rows=len(filters), vocab_size=3000)
    for temperature in (1e-9, 1.0, 1e7):
        batch = draw_batch(len(filters), (0, 1.0, 0.0), [temperature])
        batch.top_k[:], batch.top_p[:], batch.min_p[:] = zip(*filters, strict=True)
        assert draw_on_device(logits, parameters_of(batch))[0].tolist() == reference_tokens(logits, batch), temperature


@pytest.mark.parametrize("temperature", [1e-300, 1e-40, 1e40, 1e300])
def test_no_temperature_is_too_small_or_too_large(temperature: float) -> None:
    logits = torch.randn((4, 2500), generator=torch.Generator().manual_seed(0)) * 5
    logits[2, 100:] = -torch.inf
    for filters in ((0, 1.0, 0.0), (20, 0.7, 0.0), (0, 0.01, 0.5)):
        batch = draw_batch(4, filters, [temperature])
        assert draw_on_device(logits, parameters_of(batch))[0].tolist() == reference_tokens(logits, batch)


def test_few_kept_logits_are_drawn_as_often_as_the_reference_does() -> None:
    # An id too many or too few would be drawn by some of so many rows.
    logits = (torch.randn(2100, generator=torch.Generator().manual_seed(2)) * 4).round().repeat(24, 1) / 4
    for filters in ((5, 1.0, 0.0), (2, 1.0, 0.0), (0, 0.005, 0.0)):
        batch = draw_batch(24, filters)
        expected = reference_tokens(logits, batch)
        assert len(set(expected)) > 1
        assert draw_on_device(logits, parameters_of(batch))[0].tolist() == expected


def test_a_row_is_drawn_alike_alone_in_a_batch_and_in_parts_of_any_size(monkeypatch: pytest.MonkeyPatch) -> None:
    logits = torch.randn((5, 9000), generator=torch.Generator().manual_seed(3)) * 2
    logits[::2, 8990] = 20.0  # in the last part
    batch = draw_batch(5, (0, 1.0, 0.0), [0.5, 1.0, 3.0, 1.0, 1.0])
    batch.top_k[:], batch.top_p[:] = [0, 40, 300, 7, 0], [0.9, 0.8, 0.3, 1.0, 1.0]
    parameters = parameters_of(batch)
    together = draw_on_device(logits, parameters)[0].tolist()
    for row in range(5):
        alone = DrawParameters(
            *(getattr(parameters, field.name)[row : row + 1] for field in dataclasses.fields(parameters))
        )
        assert draw_on_device(logits[row : row + 1], alone)[0].tolist() == [together[row]]
    monkeypatch.setattr("twostroke.model.cuda.kernels.device_sampling._PROGRAMS", 8)
    assert draw_on_device(logits, parameters)[0].tolist() == together


def test_of_a_language_models_logits_few_are_added_to_bins(monkeypatch: pytest.MonkeyPatch) -> None:
    searches: list[tuple[Tensor, Tensor]] = []
    cut = device_sampling.cut_kernel

    class Recorded:
        def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
            def launch(*arguments: Any, **options: Any) -> None:
                searches.append(arguments[-2:])
                cut[grid](*arguments, **options)

            return launch

    monkeypatch.setattr(device_sampling, "cut_kernel", Recorded())
    logits = torch.randn((1, 9001), generator=torch.Generator().manual_seed(3)) * 5
    logits[0, 3000:6000] = -torch.inf
    draw_on_device(logits, parameters_of(draw_batch(1, (8, 1.0, 0.0), [1.0])))
    draw_on_device(logits, parameters_of(draw_batch(1, (0, 0.9, 0.0), [1.0])))
    (_, counts), _, _, (masses_state, masses) = searches
    assert 8 <= counts[0].sum() <= 24
    assert counts[1].sum() <= counts[0].max() + 8
    assert 0.95 * masses_state[0, 0, 5] < masses[0].sum() < masses_state[0, 0, 5]


@pytest.mark.parametrize("shape", ["next to each other", "far apart"])
def test_what_lies_around_rows_and_in_new_memory_is_neither_read_nor_written(
    shape: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    empty = torch.empty

    def poisoned(*arguments: Any, **options: Any) -> Tensor:
        tensor = empty(*arguments, **options)
        return tensor if tensor.is_floating_point() else tensor.fill_(1 << 30)

    monkeypatch.setattr(torch, "empty", poisoned)
    inner = shaped(shape, rows=3, vocab_size=2049)
    around = torch.full((5, 2200), torch.nan)
    around[1::2] = torch.inf
    around[1:4, 64 : 64 + 2049] = inner
    before, batch = around.clone(), draw_batch(3, (30, 0.9, 0.0), [1e6])
    tokens, broken = draw_on_device(around[1:4, 64 : 64 + 2049], parameters_of(batch))
    assert tokens.tolist() == reference_tokens(inner, batch)
    assert broken.tolist() == [0] * 3
    assert torch.equal(around.view(torch.int32), before.view(torch.int32))


def test_rows_without_a_finite_logit_give_token_0_whatever_they_ask_for() -> None:
    logits = torch.full((3, 2500), -torch.inf)
    logits[1] = torch.nan
    logits[2, 2400] = 1.0
    tokens, broken = draw_on_device(logits, parameters_of(draw_batch(3, (5, 0.5, 0.1))))
    assert tokens.tolist() == [0, 0, 2400]
    assert broken.tolist() == [0, 1, 0]


@pytest.mark.parametrize("vocab_size", [4097, pytest.param(128256, marks=pytest.mark.wide)])
def test_what_no_row_asks_for_is_not_launched(vocab_size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    launched: list[SamplingFeatures] = []

    def draw(logits: Tensor, parameters: DrawParameters, asked: SamplingFeatures) -> Tensor:
        launched.append(asked)
        if vocab_size < 10_000:
            assert draw_on_device(logits, parameters).tolist() == draw_on_device(logits, parameters, asked).tolist()
        return draw_on_device(logits, parameters, asked)

    monkeypatch.setattr("twostroke.model.cuda.sampler.draw_on_device", draw)
    logits = torch.randn((2, vocab_size), generator=torch.Generator().manual_seed(0))
    greedy, top_k_1 = SamplingParams(temperature=0.0, top_k=9, top_p=0.5), SamplingParams(top_k=1, top_p=0.5)
    cases = {
        SamplingFeatures(False, False, False): (greedy, top_k_1),
        SamplingFeatures(True, False, False): (greedy, SamplingParams(min_p=0.3)),
        SamplingFeatures(True, True, False): (SamplingParams(top_k=9), top_k_1),
        SamplingFeatures(True, False, True): (SamplingParams(), SamplingParams(top_p=0.5)),
    }
    for asked, sampling in cases.items():
        draws = [Draw(one, [1], 1) for one in sampling]
        drawn = DeviceSampler(vocab_size, torch.device("cpu")).launch(logits.clone(), draws, [4, 4])
        assert launched.pop() == asked
        expected = Sampler(vocab_size).sample(logits.clone(), draws, [4, 4])
        assert drawn.collect() == [token.token_id for token in expected]


def test_greedy_rows_take_the_first_of_the_largest_beside_rows_that_draw() -> None:
    logits = (torch.randn((4, 300), generator=torch.Generator().manual_seed(0)) * 2).round()
    batch = draw_batch(4, (0, 0.9, 0.0), seed=1)
    alone, _ = draw_on_device(logits, parameters_of(batch))
    mixed = parameters_of(batch)
    mixed.temperature[[0, 2]] = 0.0
    tokens, _ = draw_on_device(logits, mixed)
    assert tokens[[0, 2]].tolist() == logits.argmax(1)[[0, 2]].tolist()
    assert tokens[[1, 3]].tolist() == alone[[1, 3]].tolist()


def test_broken_logits_are_told_and_never_drawn() -> None:
    logits = torch.randn((4, 300), generator=torch.Generator().manual_seed(0))
    logits[0, 7] = float("nan")
    logits[1, 9] = float("inf")
    logits[2] = float("-inf")
    batch = parameters_of(draw_batch(4, (0, 1.0, 0.0), seed=1))
    batch.temperature[0] = 0.0
    tokens, broken = draw_on_device(logits, batch)
    assert broken.tolist() == [1, 1, 0, 0]
    assert tokens[0] == logits[0].nan_to_num(nan=float("-inf")).argmax()
    assert tokens[1:3].tolist() == [9, 0]


@pytest.mark.parametrize("vocab_size", [1, 33, 2048, 5000])
def test_masks_take_out_what_the_reference_does(vocab_size: int) -> None:
    random = np.random.default_rng(vocab_size)
    words = random.integers(-(2**31), 2**31, (3, -(-vocab_size // 32))).astype(np.int32)
    words[1, 0], words[2, 0] = 0, -1
    logits = torch.randn((5, vocab_size), generator=torch.Generator().manual_seed(1))
    logits[4, 0] = float("nan")
    rows, expected = np.array([0, 2, 4]), logits.clone()
    TorchSampling().mask(expected, rows, words)
    mask_on_device(logits, torch.from_numpy(rows), torch.from_numpy(words))
    assert torch.equal(logits.nan_to_num(nan=7.0), expected.nan_to_num(nan=7.0))


REQUESTS = [
    SamplingParams(temperature=0.0),
    SamplingParams(temperature=0.5, seed=-3),
    SamplingParams(temperature=1.0, seed=1 << 70, top_k=1),
    SamplingParams(temperature=1.0, seed=4, top_k=20, top_p=0.8),
    SamplingParams(temperature=1.5, seed=5, min_p=7.0),
    SamplingParams(temperature=1.0, seed=6, repetition_penalty=1.5, presence_penalty=0.5, frequency_penalty=0.25),
    SamplingParams(temperature=0.0, logit_bias=((17, 50.0),)),
]


def test_the_device_sampler_draws_what_the_other_one_does() -> None:
    cpu = torch.device("cpu")
    logits = torch.randn((len(REQUESTS), 200), generator=torch.Generator().manual_seed(1)) * 2
    draws = [Draw(sampling, [3, 5, 5, 9], 2, forbidden=(11,)) for sampling in REQUESTS]
    positions = [4 + i for i in range(len(REQUESTS))]
    expected = Sampler(200).sample(logits.clone(), draws, positions)
    sampler = DeviceSampler(200, cpu)
    drawn = sampler.launch(logits.clone(), draws, positions)
    assert drawn.collect() == [token.token_id for token in expected]
    assert sampler.num_broken_rows == 0
    assert drawn.tokens.tolist() == [token.token_id for token in expected]


class Replayed(Repeating):
    """Counts the replays of its graphs, which are the functions themselves."""

    def __init__(self) -> None:
        super().__init__()
        self.num_recorded = self.num_replays = 0

    def record(self, run: Callable[[], None]) -> Callable[[], None]:
        self.num_recorded += 1
        run()

        def replay() -> None:
            self.num_replays += 1
            run()

        return replay


ROWS_ASKING: dict[str, list[SamplingParams]] = {
    "nothing": [SamplingParams(temperature=0.0)] * 3,
    "draws": [SamplingParams(seed=7), SamplingParams(seed=8, temperature=0.5)],
    "top_k": [SamplingParams(seed=9, top_k=5)],
    "top_p": [SamplingParams(seed=9, top_p=0.5), SamplingParams(temperature=0.0), SamplingParams(seed=2)],
    "both, and adjusted logits": [SamplingParams(seed=1, top_k=9, top_p=0.8, presence_penalty=1.5)] * 4,
}


def test_captured_draws_are_those_of_each_step_and_one_launch_whatever_rows_ask_for() -> None:
    cpu, random = torch.device("cpu"), torch.Generator().manual_seed(5)
    sampler, recorder = DeviceSampler(200, cpu), Replayed()
    captured = torch.zeros(5, 200)  # a graph's place for its logits
    sampler.capture(captured, [1, 3, 5, MAX_CAPTURED_ROWS + 1], recorder)
    assert recorder.num_recorded == 3 * 5, "what many rows take, they take eagerly"
    drawn_before: list[tuple[Any, list[int]]] = []
    for number, sampling in enumerate([*ROWS_ASKING.values(), *ROWS_ASKING.values()]):
        rows = len(sampling)
        captured[:rows] = torch.randn(rows, 200, generator=random) * 3
        draws = [Draw(one, [3, 5, 5, 9], 2) for one in sampling]
        positions = [4 + number + row for row in range(rows)]
        expected = [token.token_id for token in Sampler(200).sample(captured[:rows].clone(), draws, positions)]
        drawn = sampler.launch(captured[:rows], draws, positions)
        assert drawn.tokens.tolist() == expected
        assert recorder.num_replays == number + 1
        drawn_before.append((drawn, expected))
    assert [drawn.collect() for drawn, _ in drawn_before] == [expected for _, expected in drawn_before]
    others = torch.randn(2, 200, generator=random)
    draws = [Draw(SamplingParams(temperature=0.0), [1], 1)] * 2
    assert sampler.launch(others, draws, [4, 4]).collect() == others.argmax(1).tolist()
    assert recorder.num_replays == 10, "logits of other steps are drawn from where they lie"


@pytest.mark.parametrize("ranks", [1, 2])
def test_an_engine_captures_draws_behind_its_decode_steps_unless_ranks_gather_logits(
    ranks: int, write_checkpoint: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    decoder, cache = make_decoder(write_checkpoint(), CpuBackend(), num_blocks=16, block_size=4, max_context=16)
    recorder = Replayed()
    monkeypatch.setattr(load, "Recorder", lambda device: recorder)
    monkeypatch.setattr(load, "prompt_shapes", lambda *_: [])
    sampler = DeviceSampler(decoder.vocab_size, torch.device("cpu"))
    config = EngineConfig(Path(), device="cuda", parallel=ParallelForm(ranks), bounds=StepBounds(16, 2))
    replays = load._graphs(config, decoder, cache, 16, sampler)
    assert recorder.num_recorded == (2 + 2 * 5 if ranks == 1 else 2)
    draw = Draw(SamplingParams(seed=3, top_p=0.9), [1], 1)
    runner = ModelRunner(decoder, sampler, cache, 16, replays)
    drawn = runner.run([SequenceStep([5], 0, [1], draw)])
    assert recorder.num_replays == (2 if ranks == 1 else 1)
    assert drawn == ModelRunner(decoder, Sampler(decoder.vocab_size), cache, 16).run([SequenceStep([5], 0, [1], draw)])


def test_broken_rows_of_captured_draws_are_counted_and_rows_of_no_request_are_not() -> None:
    sampler, captured = DeviceSampler(50, torch.device("cpu")), torch.full((4, 50), float("nan"))
    sampler.capture(captured, [4], Repeating())
    captured[1] = 0.0
    fault = RowFault()
    draws = [Draw(SamplingParams(temperature=0.0), [1], 1, fault=fault), Draw(SamplingParams(seed=1), [1], 1)]
    assert len(sampler.launch(captured[:2], draws, [4, 4]).collect()) == 2
    assert sampler.num_broken_rows == 1
    assert isinstance(fault.error, BrokenLogits)


def test_the_device_sampler_keeps_to_masks_with_and_without_log_probabilities() -> None:
    random, size, count = np.random.default_rng(3), 200, 40
    logits = torch.from_numpy(random.normal(size=(count, size)).astype(np.float32))
    rows = np.arange(1, count, 2)
    words = random.integers(0, 2**31, (len(rows), 7)).astype(np.int32)
    words[3] = 0
    words[3, 4] = 1 << 9
    constraint = Constraint(LLMatcher(LLTokenizer("byte"), "{}", log_level=0), pytest.fail)
    held = [constraint if row % 2 else None for row in range(count)]
    masks = TokenMasks(rows, words)
    for logprobs in (None, 2):
        sampling = [SamplingParams(seed=row, temperature=row % 3, logprobs=logprobs) for row in range(count)]
        draws = [
            Draw(params, [1], 1, forbidden=(2,), constraint=one) for params, one in zip(sampling, held, strict=True)
        ]
        positions = [3] * count
        expected = Sampler(size).sample(logits.clone(), draws, positions, masks)
        sampler = DeviceSampler(size, torch.device("cpu"))
        if logprobs is None:
            drawn = sampler.launch(logits.clone(), draws, positions, masks)
            assert drawn.wait() == drawn.collect() == [token.token_id for token in expected]
            assert expected[7].token_id == 4 * 32 + 9
        else:
            assert sampler.sample(logits.clone(), draws, positions, masks) == expected


@pytest.mark.parametrize("rows", [1, 2, 3, 8, 9])
def test_parameters_begin_where_no_number_of_rows_asks_for_kernels_of_its_own(
    rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    given: list[DrawParameters] = []

    def draw(logits: Tensor, parameters: DrawParameters, asked: SamplingFeatures) -> Tensor:
        given.append(parameters)
        return draw_on_device(logits, parameters, asked)

    monkeypatch.setattr("twostroke.model.cuda.sampler.draw_on_device", draw)
    draws = [Draw(SamplingParams(seed=seed), [1], 1) for seed in range(rows)]
    DeviceSampler(20, torch.device("cpu")).launch(torch.randn(rows, 20), draws, [4] * rows)
    for field in dataclasses.fields(DrawParameters):
        assert getattr(given[0], field.name).data_ptr() % 16 == 0, field.name


def test_log_probabilities_of_many_rows_are_those_of_each() -> None:
    cpu = torch.device("cpu")
    logits = torch.randn((37, 50), generator=torch.Generator().manual_seed(1))
    draws = [Draw(SamplingParams(seed=row, logprobs=row % 3), [1], 1) for row in range(37)]
    expected = Sampler(50).sample(logits.clone(), draws, [9] * 37)
    assert DeviceSampler(50, cpu).sample(logits, draws, [9] * 37) == expected
