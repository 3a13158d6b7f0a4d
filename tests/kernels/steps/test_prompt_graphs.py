"""Small steps with prompts through graphs, in Triton's interpreter: the bits of eager ones, and no one else's blocks.

A graph here is the function itself, over the memory that a captured one would read.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.model.architectures.test_conformance import FAMILY_SHAPES
from tests.model.conftest import make_decoder
from tests.rigs.gpu_dry_run import Repeating
from twostroke.model.architectures.decoder import Decoder
from twostroke.model.batch import StepInput
from twostroke.model.cache.kv_cache import KVCache
from twostroke.model.captured_steps import ALL_EAGER, StepReplays
from twostroke.model.cuda.backend import CudaBackend
from twostroke.model.cuda.graphs import (
    MAX_CHUNKS,
    MAX_ROWS,
    PromptGraphs,
    StepShape,
    most_rows,
    step_shapes,
)
from twostroke.model.cuda.kernels.launch import H100
from twostroke.model.engine_config import EngineConfig
from twostroke.model.load import prompt_shapes
from twostroke.model.runner import ModelRunner
from twostroke.model.sampling.sampler import Sampler
from twostroke.model.step import Draw, OnLayer, PromptScorer, SequenceStep
from twostroke.protocol.requests import SamplingParams, ScoringParams

pytestmark = pytest.mark.usefixtures("interpreter")

SMALL = replace(H100, multiprocessors=4)  # so that the interpreter has few programs to run
BLOCK_SIZE, NUM_BLOCKS, MAX_CONTEXT = 16, 24, 96
GREEDY = SamplingParams(temperature=0.0)
SHAPES = [StepShape(4, 32), StepShape(0, 32)]
TINY = {"num_hidden_layers": 2, "hidden_size": 64, "intermediate_size": 64}
MODELS: dict[str, dict[str, Any]] = {
    "grouped heads": TINY,
    "windows in some layers": {**FAMILY_SHAPES["gemma2"], "sliding_window": 9},
    "experts": {**FAMILY_SHAPES["qwen2_moe"]},
}


def step(length: int, start: int, blocks: Sequence[int], *, draws: bool = True, first: int = 5) -> SequenceStep:
    tokens = [(first + 7 * index) % 90 for index in range(length)]
    return SequenceStep(tokens, start, blocks, Draw(GREEDY, tokens, length) if draws else None)


# Steps of one token beside prompts with and without prefixes, of which some draw nothing. Tables are of one group.
BATCHES = {
    "one prompt": [step(20, 0, [3, 1])],
    "a prompt that fills its graph": [step(32, 0, [3, 1])],
    "prompts, one after a prefix": [step(9, 0, [2]), step(11, 30, [7, 5, 4], first=9), step(2, 14, [9], first=1)],
    "chunks that draw nothing beside one that does": [step(9, 0, [2], draws=False), step(8, 16, [7, 5])],
    "decodes beside prompts": [step(10, 17, [2, 8]), step(1, 70, [4, 6, 9, 11, 13]), step(1, 3, [0]), step(6, 0, [5])],
    "as many decodes as fit": [*[step(1, 5 + row, [row], first=row) for row in range(4)], step(6, 0, [5])],
    "a mixed step that fills its graph": [
        *[step(1, 5 + row, [row], first=row) for row in range(4)],
        step(32, 0, [5, 9]),
    ],
    "a decode that draws nothing": [step(1, 5, [3], draws=False), step(6, 0, [5])],
    "one token alone": [step(1, 31, [6, 2])],
}


def made(folder: Any, **options: Any) -> tuple[Decoder, KVCache]:
    return make_decoder(
        folder, CudaBackend(SMALL), num_blocks=NUM_BLOCKS, block_size=BLOCK_SIZE, max_context=MAX_CONTEXT, **options
    )


def of_groups(batch: Sequence[SequenceStep], groups: int) -> list[SequenceStep]:
    """Return the batch with blocks of other numbers for each group."""
    return [
        SequenceStep(
            one.token_ids,
            one.start,
            [(block + 8 * group) % NUM_BLOCKS for block in one.block_ids for group in range(groups)],
            one.draw,
        )
        for one in batch
    ]


class Noting(Sampler):
    """Keeps the logits."""

    def __init__(self, vocab_size: int):
        super().__init__(vocab_size)
        self.seen: list[Tensor] = []

    def sample(self, logits: Tensor, *others: Any) -> Any:
        self.seen.append(logits.clone())
        return super().sample(logits, *others)


class Counting(PromptGraphs):
    """Counts the steps that it takes."""

    taken = 0

    def logits(self, *arguments: Any) -> Tensor | None:
        found = super().logits(*arguments)
        self.taken += found is not None
        return found


def both(
    made: tuple[Decoder, KVCache], shapes: Sequence[StepShape] = SHAPES
) -> tuple[Noting, Counting, list[ModelRunner]]:
    """Return the logits' recorder, the graphs, and runners without them and with them."""
    decoder, cache = made
    sampler, graphs = Noting(decoder.vocab_size), Counting(decoder, cache, MAX_CONTEXT, shapes, Repeating())
    runners = [
        ModelRunner(decoder, sampler, cache, MAX_CONTEXT, one) for one in (ALL_EAGER, StepReplays(prompts=graphs))
    ]
    return sampler, graphs, runners


def is_close(actual: Tensor, expected: Tensor) -> bool:
    return torch.allclose(actual, expected, rtol=1e-4, atol=1e-4)


def check_same(found: tuple[Decoder, KVCache], batches: Sequence[Sequence[SequenceStep]]) -> None:
    """Check that graphs give eager steps' tokens, logits and KV, and change nothing else of the cache."""
    sampler, graphs, runners = both(found)
    cache = found[1]
    for batch in batches:
        before = [
            torch.randn(layer.shape, generator=torch.Generator().manual_seed(3)).to(layer.dtype)
            for layer in cache.tensors
        ]
        results, caches = [], []
        for runner in runners:
            for layer, old in zip(cache.tensors, before, strict=True):
                layer.copy_(old)
            results.append(runner.run(batch))
            caches.append([layer.clone() for layer in cache.tensors])
        assert results[0] == results[1]
        expected, actual = sampler.seen[-2:]
        # Tiles are chosen by the number of rows: with as many there are the same bits.
        is_full = sum(len(one.token_ids) for one in batch) in [shape.rows for shape in SHAPES]
        same = torch.equal if is_full else is_close
        assert same(actual, expected)
        for old, eager, graph in zip(before, *caches, strict=True):
            assert same(graph.float(), eager.float())
            assert torch.equal(graph == old, eager == old)
    assert graphs.taken == len(batches)


@pytest.mark.wide  # each by itself; all together below
@pytest.mark.parametrize("kind", BATCHES)
def test_small_steps_by_graphs_are_eager_ones(write_checkpoint: Callable[..., Any], kind: str) -> None:
    check_same(made(write_checkpoint(**TINY)), [BATCHES[kind]])


@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")  # of the NaN in what belongs to no sequence
@pytest.mark.parametrize("kind", [kind for kind in MODELS if kind != "grouped heads"])
def test_graphs_do_what_eager_steps_do_in_all_kinds_of_models(write_checkpoint: Callable[..., Any], kind: str) -> None:
    found = made(write_checkpoint(**MODELS[kind]))
    check_same(found, [of_groups(BATCHES["decodes beside prompts"], found[1].groups.count)])


def test_graphs_do_what_eager_steps_do_over_a_cache_in_fp8(write_checkpoint: Callable[..., Any]) -> None:
    found = made(write_checkpoint(**TINY), kv_dtype=torch.float8_e4m3fn)
    check_same(found, [BATCHES["decodes beside prompts"]])


def test_a_step_finds_nothing_of_those_before_it_in_its_graph(write_checkpoint: Callable[..., Any]) -> None:
    check_same(made(write_checkpoint(**TINY)), [*BATCHES.values(), *reversed(BATCHES.values())])


def test_places_that_a_step_leaves_empty_have_no_context_to_read(write_checkpoint: Callable[..., Any]) -> None:
    class Seeing:
        vocab_size = logits_width = 96
        contexts: list[int]

        def forward(self, seen: StepInput, on_layer: OnLayer | None = None) -> Tensor:
            self.contexts = seen.layouts[0].context_lens.tolist()
            return torch.zeros(len(seen.drawing.rows), self.vocab_size)

        def logits(self, hidden: Tensor) -> Tensor:
            raise AssertionError(hidden)

    decoder = Seeing()
    graphs = PromptGraphs(decoder, made(write_checkpoint(**TINY))[1], MAX_CONTEXT, SHAPES, Repeating())
    with torch.inference_mode():
        for kind in ("as many decodes as fit", "decodes beside prompts", "one token alone"):
            assert graphs.logits(sorted(BATCHES[kind], key=lambda one: len(one.token_ids) > 1), [0], None) is not None
    assert decoder.contexts == [32, *[0] * (SHAPES[0].sequences - 1)]


def test_steps_that_fit_no_graph_or_draw_nothing_or_are_read_run_eagerly(write_checkpoint: Callable[..., Any]) -> None:
    _, graphs, (_, runner) = both(made(write_checkpoint(**TINY)))
    read = step(8, 0, [1])
    scorer = PromptScorer(ScoringParams(logprobs=0), read.token_ids)
    for batch in (
        [step(33, 0, [1, 2, 3])],
        [step(1, row, [row]) for row in range(5)],
        [step(2, 0, [row]) for row in range(MAX_CHUNKS + 1)],
        [step(8, 0, [1], draws=False)],
        [SequenceStep(read.token_ids, 0, [1], read.draw, scorer=scorer)],
    ):
        runner.run(batch)
        assert not graphs.taken
    runner.run([step(2, 0, [row]) for row in range(MAX_CHUNKS)])
    assert graphs.taken == 1


def test_all_layers_are_announced_in_order_before_a_step_returns(write_checkpoint: Callable[..., Any]) -> None:
    _, graphs, (_, runner) = both(made(write_checkpoint(**TINY)))
    layers: list[int] = []
    runner.run(BATCHES["one prompt"], layers.append)
    assert (graphs.taken, layers) == (1, [0, 1])


def test_decodes_beside_prompts_take_the_tokens_that_the_step_before_drew(write_checkpoint: Callable[..., Any]) -> None:
    _, graphs, _ = both(made(write_checkpoint(**TINY)))
    prompt, known = step(6, 0, [5]), [step(1, 3, [0], first=40), step(1, 7, [1], first=41)]
    following = [SequenceStep([0], one.start, one.block_ids, one.draw, 1 - row) for row, one in enumerate(known)]
    with torch.inference_mode():
        expected = graphs.logits([*known, prompt], [0, 1, 2], None)
        assert expected is not None
        expected = expected.clone()
        actual = graphs.logits([*following, prompt], [0, 1, 2], torch.tensor([41, 40]))
    assert actual is not None
    assert torch.equal(actual, expected)


@pytest.mark.parametrize(("max_tokens", "max_sequences"), [(2048, 256), (512, 32), (40, 3), (1, 1)])
@pytest.mark.parametrize("most", [384, MAX_ROWS])
def test_shapes_are_few_and_the_next_is_not_much_larger(max_tokens: int, max_sequences: int, most: int) -> None:
    shapes = step_shapes(max_tokens, max_sequences, most)
    assert len(shapes) <= 34
    assert shapes == sorted(shapes, key=lambda shape: -shape.rows)
    assert all(shape.rows <= most for shape in shapes)
    assert {shape.singles for shape in shapes} >= {0, min(max_sequences, 8)}
    for tokens in range(1, min(max_tokens, most) + 1):
        fitting = min(shape.tokens for shape in shapes if shape.tokens >= tokens and not shape.singles)
        assert fitting <= max(32, 2 * tokens)
    # The last layer computes those that draw alone where they are fewer.
    assert all(shape.sequences < shape.rows for shape in shapes)


def test_graphs_go_as_far_as_the_host_takes_longer_than_the_gpu() -> None:
    assert [most_rows(6.98e9 / 32, announces) for announces in (False, True)] == [586, 158]
    assert [most_rows(0.97e9 / 16, announces) for announces in (False, True)] == [MAX_ROWS, 570]
    assert most_rows(1e6, announces_layers=True) == MAX_ROWS


@pytest.mark.parametrize("tied", [False, True])
def test_a_larger_vocabulary_makes_no_layer_larger(tied: bool, write_checkpoint: Callable[..., Any]) -> None:
    folders = (write_checkpoint(**TINY | {"vocab_size": size, "tie_word_embeddings": tied}) for size in (96, 960))
    small, large = (made(folder)[0].parameters_a_layer for folder in folders)
    assert small == large > 0


def test_shapes_follow_the_model_and_latents_have_no_graphs(
    write_checkpoint: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = write_checkpoint(**TINY)
    decoder, cache = made(folder)
    monkeypatch.setattr(Decoder, "parameters_a_layer", 1.28e11 / 400)
    both_kinds = (prompt_shapes(EngineConfig(folder, announces_layers=each), decoder, cache) for each in (False, True))
    assert [max(shape.rows for shape in shapes) for shapes in both_kinds] == [392, 96]
    latents = write_checkpoint(**FAMILY_SHAPES["deepseek_v2"])
    assert prompt_shapes(EngineConfig(latents), *made(latents)) == []
