"""Stages together compute what one rank computes alone, and each holds no more than its part."""

import asyncio
import re
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.model.parallel.test_tensor_parallel import BLOCK_SIZE, CPU, SHAPES, ranks, runner
from twostroke.model.backend import LoadOptions
from twostroke.model.checkpoint.config_file import load_model_config
from twostroke.model.checkpoint.decoder_weights import load_decoder_weights
from twostroke.model.checkpoint.tensor_file import WHOLE
from twostroke.model.checkpoint.weights import Checkpoint
from twostroke.model.costs.sizes import check_stages, weight_bytes
from twostroke.model.cpu.backend import CpuBackend
from twostroke.model.engine_config import EngineConfig
from twostroke.model.load import LoadedEngine, load_engine
from twostroke.model.parallel import pipeline
from twostroke.model.parallel.form import ParallelForm, Stage
from twostroke.model.parallel.pipeline import micro_batches
from twostroke.model.parallel.ranked_engine import as_on_rank_0, for_ranks
from twostroke.model.parallel.tensor_parallel import RankPlace, Rendezvous, SingleRank
from twostroke.model.served import open_model
from twostroke.model.step import BlockCopy, Draw, PromptScorer, SequenceStep
from twostroke.protocol.errors import ConfigError
from twostroke.protocol.requests import SampledToken, SamplingParams, ScoringParams

FEW_TOKENS = 8
"""Tokens of a micro-batch here: a chunk of 37 tokens is four."""
LAYERS: dict[str, dict[str, Any]] = {
    "tied, an odd vocabulary": {"num_hidden_layers": 5},
    "experts of Mixtral": {"num_hidden_layers": 3},
    "experts and latents": {},  # 3, of which the first has no experts
    "stacked experts with biases, sinks": {"num_hidden_layers": 4},  # windows in turns
}
WAYS = {"2 stages": (2, 1), "2 stages of 2 ranks": (2, 2), "3 stages": (3, 1)}
CASES = [(shape, way) for shape in LAYERS for way in WAYS if (shape, way) != ([*LAYERS][-1], "3 stages")]


@pytest.fixture(autouse=True)
def _small_micro_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pipeline, "MIN_TOKENS", FEW_TOKENS)


@pytest.mark.parametrize(("shape", "way"), CASES)
def test_stages_draw_the_tokens_that_one_rank_draws(shape: str, way: str, write_checkpoint: Any, generate: Any) -> None:
    folder = write_checkpoint(seed=3, **SHAPES[shape] | LAYERS[shape])
    generator = torch.Generator().manual_seed(1)
    prompts = [torch.randint(90, (length,), generator=generator).tolist() for length in (1, 8, 9, 40, 90)]
    expected = generate(runner(folder, SingleRank()), prompts, 8, chunk=37, block_size=BLOCK_SIZE)
    stages, size = WAYS[way]
    with ranks(folder, size, stages=stages) as together:
        assert generate(together, prompts, 8, chunk=37, block_size=BLOCK_SIZE) == expected


class Engines:
    """The ranks of one engine, each loaded as its worker loads it, on this event loop."""

    def __init__(self, config: EngineConfig):
        count = config.parallel.num_ranks
        rendezvous = Rendezvous("127.0.0.1")
        # Each on a host of its own, as on several machines.
        places = [RankPlace(rank, rendezvous.address, f"127.0.0.{2 + rank}") for rank in range(count)]
        with ThreadPoolExecutor(count) as threads:
            self.loaded: list[LoadedEngine] = list(
                threads.map(lambda place: load_engine(config, place if count > 1 else None), places)
            )
        self.layers: list[list[int]] = [[] for _ in self.loaded]  # that each rank has announced

    async def step(self, batch: Sequence[SequenceStep], copies: Sequence[BlockCopy] = ()) -> list[SampledToken | None]:
        """Step on all ranks; layers are announced where a prompt is in the batch."""
        told = [batch, *[[as_on_rank_0(for_ranks(one)) for one in batch]] * (len(self.loaded) - 1)]
        announces = any(len(one.token_ids) > 1 for one in batch)
        drawn, *_ = await asyncio.gather(
            *(
                loaded.engine.step(some, layers.append if announces else None, copies)
                for loaded, some, layers in zip(self.loaded, told, self.layers, strict=True)
            )
        )
        return drawn

    def close(self) -> None:
        for loaded in self.loaded:
            loaded.engine.close()
            loaded.kv_cache.close()


async def answer(engines: Engines, params: ScoringParams) -> tuple[list[int], PromptScorer]:
    """All tokens that three requests are given: one is read in two chunks beside the others, whose draws are random,
    follow each other unseen, and go on from other blocks by way of host memory."""
    groups = engines.loaded[0].kv_cache.groups.count
    read, *others = ([(7 * i + row) % 90 for i in range(length)] for row, length in enumerate((41, 13, 1)))
    scorer = PromptScorer(params, read)
    tokens: list[int] = []

    def table(first: int, rows: int) -> list[int]:
        return list(range(first * groups, (first + rows) * groups))

    def draw(prompt: Sequence[int], **adjusted: Any) -> Draw:
        return Draw(SamplingParams(temperature=1.0, top_p=0.9, seed=5, **adjusted), prompt, len(prompt))

    def chunk(first: int, end: int) -> SequenceStep:
        drawn = Draw(SamplingParams(temperature=0.0), read, len(read)) if end == len(read) else None
        return SequenceStep(read[first:end], first, table(0, 7), drawn, scorer=scorer)

    prompts = [
        SequenceStep(prompt, 0, table(8 + 4 * i, 3), draw(prompt, frequency_penalty=0.5))
        for i, prompt in enumerate(others)
    ]
    following = [
        SequenceStep([0], len(prompt), table(8 + 4 * i, 3), draw(prompt), follows=1 + i)
        for i, prompt in enumerate(others)
    ]
    steps = [engines.step([chunk(0, 24), *prompts]), engines.step([*following, chunk(24, 41)])]
    for drawn in await asyncio.gather(*steps):
        tokens += [token.token_id for token in drawn if token is not None]
    away = [*table(8, 3), *table(12, 3)]
    back = [*table(20, 3), *table(16, 3)]
    there = list(range(len(away)))
    copies = [BlockCopy(True, away, there), BlockCopy(False, back, there)]
    moved = [
        SequenceStep([tokens[2 + i]], len(prompt) + 1, table(20 - 4 * i, 3), draw(prompt))
        for i, prompt in enumerate(others)
    ]
    tokens += [token.token_id for token in await engines.step(moved, copies) if token is not None]
    return tokens, scorer


@pytest.mark.parametrize("shape", ["tied, an odd vocabulary", "stacked experts with biases, sinks"])
async def test_stages_follow_read_swap_and_draw_at_random_as_one_rank_does(shape: str, write_checkpoint: Any) -> None:
    folder = write_checkpoint(seed=3, **SHAPES[shape] | LAYERS[shape])
    found: list[tuple[list[int], PromptScorer]] = []
    for stages, size in ((1, 1), (2, 2), (2, 1)):
        config = EngineConfig(
            folder,
            dtype="float32",
            parallel=ParallelForm(size, stages),
            block_size=BLOCK_SIZE,
            num_blocks=64,
            swap_bytes=2**20,
            threads=1,
        )
        engines = await asyncio.to_thread(Engines, config)
        found.append(await answer(engines, ScoringParams(logprobs=2, pooling="mean")))
        count, of_rank = load_model_config(folder).num_layers, engines.loaded[0].kv_cache.layout.layers_of
        for rank, layers in enumerate(engines.layers):
            assert layers == 2 * list(of_rank(rank))
        assert sum(len(of_rank(rank)) for rank in range(0, stages * size, size)) == count
        engines.close()
    (expected, read), *others = found
    assert len(expected) == 2 + 3 + 2
    for tokens, scorer in others:
        assert tokens == expected
        np.testing.assert_allclose(*(np.frombuffer(one.embedding(), "<f4") for one in (scorer, read)), atol=1e-5)
        ours, theirs = scorer.scores(), read.scores()
        assert ours is not None
        assert theirs is not None
        assert (ours.token_ids, ours.ranks) == (theirs.token_ids, theirs.ranks)
        np.testing.assert_allclose(*(np.frombuffer(one.logprobs, "<f4") for one in (ours, theirs)), atol=1e-4)


DRAW = Draw(SamplingParams(), (), 0)


@settings(deadline=None)
@given(
    sequences=st.lists(st.tuples(st.integers(1, 60), st.integers(0, 50), st.booleans()), min_size=1, max_size=12),
    count=st.integers(1, 9),
)
def test_micro_batches_together_are_the_step(sequences: list[tuple[int, int, bool]], count: int) -> None:
    sequences.sort(key=lambda one: one[0] != 1)
    steps = [
        SequenceStep(range(100 * i, 100 * i + length), start, (i,), DRAW if draws else None)
        for i, (length, start, draws) in enumerate(sequences)
    ]
    cut = micro_batches(steps, count)
    sizes = [batch.num_tokens for batch in cut]
    assert sum(sizes) == sum(len(step.token_ids) for step in steps)
    assert max(sizes) - min(sizes) <= 1 or len(cut) < count
    for entry, step in enumerate(steps):
        pieces = [part for batch in cut for part, of in zip(batch.steps, batch.entries, strict=True) if of == entry]
        assert [token for piece in pieces for token in piece.token_ids] == list(step.token_ids)
        positions = [piece.start + i for piece in pieces for i in range(len(piece.token_ids))]
        assert positions == list(range(step.start, step.start + len(step.token_ids)))
        assert [piece.draw for piece in pieces] == [*[None] * (len(pieces) - 1), step.draw]
        assert all(piece.block_ids == step.block_ids for piece in pieces)
    for batch in cut:
        lengths = [len(step.token_ids) for step in batch.steps]
        assert lengths == sorted(lengths, key=lambda length: length != 1)
        assert len(set(batch.entries)) == len(batch.entries)
        rows = [token for step in batch.steps for token in step.token_ids]
        assert [rows[row] for row in batch.drawn_rows] == [batch.steps[i].token_ids[-1] for i in batch.drawing]


def test_steps_of_decodes_and_short_prompts_stay_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pipeline, "MIN_TOKENS", 256)

    def count(*lengths: int) -> int:
        steps = [SequenceStep([0] * length, 0, (), None) for length in lengths]
        return pipeline.num_micro_batches(steps, num_stages=2)

    assert [count(*[1] * 5000), count(511), count(512), count(300, 300, 200), count(10**5)] == [1, 1, 2, 3, 8]


@pytest.mark.parametrize("shape", LAYERS)
def test_a_stage_reads_its_own_layers_alone(shape: str, write_checkpoint: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = write_checkpoint(**SHAPES[shape] | LAYERS[shape])
    config = load_model_config(folder)
    read: set[str] = set()
    tensor = Checkpoint.tensor

    def reading(checkpoint: Checkpoint, name: str, rows: slice = WHOLE, columns: slice = WHOLE) -> torch.Tensor:
        read.add(name)
        return tensor(checkpoint, name, rows, columns)

    monkeypatch.setattr(Checkpoint, "tensor", reading)
    seen: set[str] = set()
    for index in range(2):
        read.clear()
        stage, options = Stage(index, 2), LoadOptions(torch.float32, CPU, 64)
        weights = load_decoder_weights(Checkpoint(folder, config), config, options, CpuBackend(), stage=stage)
        layers = {int(found[1]) for name in read if (found := re.search(r"layers\.(\d+)\.", name)) is not None}
        assert layers == set(stage.layers(config.num_layers))
        assert (weights.ends is None) == (not any("layers." not in name for name in read)) == (index == 1)
        seen |= read
    assert seen == Checkpoint(folder, config).shapes.keys()


def test_the_stage_with_the_most_bytes_counts(write_checkpoint: Any) -> None:
    config = load_model_config(write_checkpoint(num_hidden_layers=5))
    model, two = (weight_bytes(config, 4, "auto", parallel=ParallelForm(stages=stages)) for stages in (1, 2))
    ends = 4 * config.hidden_size * (2 * config.vocab_size + 1)
    layer = (model - ends) // 5
    assert model == ends + 5 * layer
    assert two == max(ends + 2 * layer, 3 * layer)


@pytest.mark.parametrize(
    ("shape", "stages", "said"),
    [
        ("tied, an odd vocabulary", 6, "6 stages can't share the model's 5 layers"),
        ("stacked experts with biases, sinks", 3, "3 stages of the model's 4 layers .*: use 1 or 2$"),
    ],
)
def test_stages_that_can_not_share_a_model_are_refused(
    shape: str, stages: int, said: str, write_checkpoint: Any
) -> None:
    config = load_model_config(write_checkpoint(**SHAPES[shape] | LAYERS[shape]))
    with pytest.raises(ConfigError, match=f"pipeline_parallel: {said}"):
        check_stages(config, stages)


def test_stages_of_what_transformers_computes_are_refused(write_checkpoint: Any) -> None:
    model = open_model(write_checkpoint(), "transformers")
    with pytest.raises(ConfigError, match=r"pipeline_parallel: LlamaForCausalLM is computed by transformers.*use 1"):
        model.check_ranks(ParallelForm(stages=2), 16)
