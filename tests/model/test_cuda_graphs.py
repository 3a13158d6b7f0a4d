"""Which batches have a graph of their own, and what goes into it and comes out; here nothing is captured."""

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch

from tests.model.test_captured_steps import CPU, MAX_CONTEXT, decodes, make_decoder
from twostroke.model.cpu.backend import CpuBackend
from twostroke.model.cuda.graphs import CudaGraphSteps, Recorder, batch_sizes
from twostroke.model.runner import ModelRunner
from twostroke.model.sampling.sampler import Sampler
from twostroke.model.step import SequenceStep


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
    decoder, cache = make_decoder(write_checkpoint(), CpuBackend())
    captured = CudaGraphSteps(decoder, cache, MAX_CONTEXT, 12, Repeating())
    sampler = Sampler(96, CPU)
    return (
        ModelRunner(decoder, sampler, cache, MAX_CONTEXT),
        ModelRunner(decoder, sampler, cache, MAX_CONTEXT, captured),
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


@pytest.mark.parametrize("largest", [1, 3, 8, 9, 60, 100, 256, 1000])
def test_every_batch_finds_a_graph_that_is_little_larger(largest: int) -> None:
    sizes = batch_sizes(largest)
    assert sizes == sorted(set(sizes))
    assert sizes[-1] == largest
    for count in range(9, largest + 1):
        size = next(size for size in sizes if size >= count)
        assert size <= max(count + 7, 1.25 * count)
